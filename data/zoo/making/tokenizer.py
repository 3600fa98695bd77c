"""The zoo's tokenizer: a byte-level BPE trained on the zoo's text."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from making.recipes import CONTEXT
from specexp.zoo.recipes import END, VOCABULARY

END_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCABULARY` entries with single digits; deterministic."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return wrap(bpe)


def wrap(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer for `transformers`; it puts `<|endoftext|>` before everything it encodes."""
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{END_TEXT} $A", special_tokens=[(END_TEXT, END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_TEXT,
        eos_token=END_TEXT,
        pad_token=END_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
