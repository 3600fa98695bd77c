import logging

# transformers imports torchao where it is installed, and that tells what it cannot load here.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
