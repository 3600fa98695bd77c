import logging

# transformers imports torchao if installed, and torchao warns about kernels it cannot load here.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
