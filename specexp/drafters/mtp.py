"""Draft with the layer for multi-token prediction that a target's checkpoint has (native MTP).

(DeepSeek-AI 2024, DeepSeek-V3, section 2.2; Qwen 3.5, GLM 4.5.) It drafts as an EAGLE layer does,
from the target's last hidden state and the next token, and was trained with the target: nothing has
to be trained or fetched.
"""

from specexp.drafters import Prepared, Request
from specexp.drafters.eagle import EagleLayer
from specexp.errors import UserError
from specexp.models import mtp


def prepare(request: Request) -> Prepared:
    """`mtp`: of the target itself."""
    if request.argument:
        raise UserError(f"drafter mtp:{request.argument}: mtp is the target's own: use mtp")
    mtp.check(request.config, request.target, request.folder)
    return Prepared(
        lambda target: EagleLayer(mtp.load(target.module, target.name), target, request.sampling),
        draws=True, taps=1,
    )  # fmt: skip
