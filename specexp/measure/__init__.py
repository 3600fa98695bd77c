"""Numbers with intervals: one pairing, its costs, policies under load, exactness, the hardware.

    from specexp import measure
    measure.one_pairing.latency(pairing, prompts, gammas, max_new_tokens)

Each file is loaded when it is first named.
"""

from specexp.objects import lazily

__all__, __getattr__ = lazily(__name__, __path__)
