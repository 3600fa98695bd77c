"""Tables in, figures out. Nothing here measures or imports torch.

    from specexp import figures
    figures.pairings.by_category(samples)

Each file is loaded when it is first named.
"""

from specexp.objects import lazily

__all__, __getattr__ = lazily(__name__, __path__)
