# SPDX-License-Identifier: MIT OR Apache-2.0
"""transformers' own tests that all models share, on small models of many types.

The source distribution of transformers has these tests (`tests/test_modeling_common.py`), but not
the testers of models: configurations and inputs are those of `small_models.py`. Run it with the
unpacked distribution of the installed version, and `pip install parameterized`:

    pip download --no-binary :all: --no-deps transformers==5.24.0
    TRANSFORMERS=transformers-5.24.0 PYTHONPATH=benches/python \
        python -m pytest -p streamed_transformers benches/python/common_transformers.py

Without `-p streamed_transformers`, models are in memory: some tests ask for more than a tester that
knows nothing of the model can give, and fail. `TYPES=bert,llama` chooses types of models.
"""

from __future__ import annotations

import copy
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [
    str(Path(__file__).parents[2] / "crates" / "ts-py" / "tests"),
    os.environ["TRANSFORMERS"],
]
# The distribution lacks these two files, whose tests have names of their own.
for name, mixin in (
    ("tests.exporters.test_export", "ExportTesterMixin"),
    ("tests.generation.test_utils", "GenerationTesterMixin"),
):
    stub: Any = types.ModuleType(name)
    setattr(stub, mixin, type(mixin, (), {}))
    sys.modules[name] = stub

from small_models import Excluded, small_model  # noqa: E402

common: Any = __import__("tests.test_modeling_common", fromlist=["ModelTesterMixin"])

TYPES = (
    "bert,roberta,distilbert,albert,electra,deberta-v2,llama,mistral,qwen2,qwen3,gemma2,phi3,gpt2,"
    "gpt_neox,opt,bloom,falcon,mixtral,qwen2_moe,olmoe,t5,bart,pegasus,whisper,wav2vec2,vit,swin,"
    "convnext,resnet,dinov2,clip,siglip,mamba,rwkv,xlnet,longformer,funnel,led,m2m_100,mpt,codegen,"
    "gptj,stablelm,cohere,detr,segformer,layoutlm,modernbert,granite,gpt_oss"
)


class SmallTester:
    """What transformers' tests ask of a tester of models."""

    is_training = True

    def __init__(self, model_type: str) -> None:
        small = small_model(model_type)
        self.config: Any = small.model.config
        self.model_class = type(small.model)
        self.inputs = small.inputs
        first = next(each for each in small.inputs.values() if each.ndim)
        self.batch_size, self.seq_length = first.shape[0], first.shape[-1]
        text = self.config.get_text_config()
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
            if isinstance(value := getattr(text, name, None), int):
                setattr(self, name, value)

    def get_config(self) -> Any:
        return copy.deepcopy(self.config)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return copy.deepcopy(self.config), copy.deepcopy(self.inputs)


testers: dict[str, SmallTester | str] = {}


def class_of(model_type: str) -> type:
    """Returns the tests of a type of models."""

    def set_up(self: Any) -> None:
        if model_type not in testers:
            try:
                testers[model_type] = SmallTester(model_type)
            except Excluded as reason:
                testers[model_type] = str(reason)
        tester = testers[model_type]
        if isinstance(tester, str):
            self.skipTest(tester)
        self.model_tester = tester
        self.all_model_classes = (tester.model_class,)
        self.is_encoder_decoder = bool(tester.config.is_encoder_decoder)

    name = "Test_" + model_type.replace("-", "_")
    own = {"setUp": set_up, "__module__": __name__}
    return type(name, (common.ModelTesterMixin, unittest.TestCase), own)


for model_type in os.environ.get("TYPES", TYPES).split(","):
    globals()["Test_" + model_type.replace("-", "_")] = class_of(model_type)
