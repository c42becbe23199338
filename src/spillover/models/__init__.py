"""Models on this machine: names, files, fingerprints, tokenizers, chat templates and adapters.

Imports nothing heavy: numpy, tokenizers, jinja2 and the hub client load inside the calls that need them.
"""

from __future__ import annotations

from spillover.models.config import ModelConfig
from spillover.models.folders import adapters_home, home, models_home
from spillover.models.index import TensorSlice, WeightIndex, linears
from spillover.models.lora import MODULES, Adapter, LoraConfig, initial, parse_targets
from spillover.models.model import InstalledModel, Model, installed, resolve
from spillover.models.tags import DEMO, TAGS, ModelRef, parse
from spillover.models.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "DEMO",
    "MODULES",
    "TAGS",
    "Adapter",
    "InstalledModel",
    "LoraConfig",
    "Model",
    "ModelConfig",
    "ModelRef",
    "StreamDecoder",
    "TensorSlice",
    "Tokenizer",
    "WeightIndex",
    "adapters_home",
    "home",
    "initial",
    "installed",
    "linears",
    "models_home",
    "parse",
    "parse_targets",
    "resolve",
]
