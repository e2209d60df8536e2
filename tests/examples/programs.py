"""Running an example program, and what its tests compare."""

import importlib
import json
from pathlib import Path

import torch

# Replaces a GPU: it has no values, and cannot be combined with the CPU.
META = torch.device("meta")


def smoke(name: str, folder: Path) -> dict:
    """The results in a program's folder after a smoke run."""
    main = importlib.import_module(f"examples.{name}.__main__").main
    main(["--smoke", "--device", "cpu", "--out", str(folder)])
    for picture in folder.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def pictures(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.png")}


def gradients(loss, model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters()}
