"""The networks that draft from the target's hidden states, and what they share.

layouts.py knows how they are published, weights.py checks, loads and saves them. Tensor names are
those of the published checkpoints. Embeddings, and an LM head that is not their own, are borrowed
from the target, so a `state_dict` holds only what was trained. Attention, MLP, norms and rotary
positions are transformers' own. How they make drafts is in drafters/, how they are trained in
zoo/heads.py.
"""
