"""What the fork server imports before it forks workers: hardly anything else happens here.

No tensor operation, no `torch.cuda` call, no thread: a fork of a process that has done any of
these hangs or fails on its first use of the device. The list costs about 330 MiB once, shared by
all workers, of which torch and transformers' base classes are 320: a model module more costs well
under one MiB, so the common architectures are all here.
"""

from __future__ import annotations

import importlib

from penstock.worker.backends.preload import preload_backends

MODULES = (
    "safetensors.torch",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "penstock.worker.loop",
    "penstock.worker.loading",
    "penstock.worker.encoding.loading",
)
# An architecture that is not here is imported by the worker that needs it.
COMMON_ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt_oss",
    "glm4_moe",
    "bert",
    "xlm_roberta",
    "modernbert",
)

preload_backends()
for _module in MODULES:
    importlib.import_module(_module)
for _name in COMMON_ARCHITECTURES:
    importlib.import_module(f"transformers.models.{_name}.modeling_{_name}")
