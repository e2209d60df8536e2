"""Other people's packages: found, made importable, and never fetching anything."""

import os
import sys
from pathlib import Path

import torchvision_stub

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torchvision_stub.define_missing_operators()
sys.path.append(str(Path(__file__).parents[1] / "distributed"))  # for ranks.py
