"""Package metadata; linters and test settings are in pyproject.toml, pinned versions in requirements*.txt."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
INIT = (HERE / "megatron_overlap" / "__init__.py").read_text(encoding="utf-8")
VERSION = re.findall(r'^__version__ = "(.+)"$', INIT, re.MULTILINE)[0]

TENSORBOARD = ["tensorboard"]
TOKENIZERS = ["transformers", "tokenizers"]
DEMO = ["rich", *TOKENIZERS]
TEST = ["pytest>=8", "hypothesis", *TENSORBOARD, *DEMO]
DEV = [*TEST, "ruff", "mypy>=1.15", "import-linter", "pre-commit", "matplotlib"]

setup(
    name="megatron_overlap",
    version=VERSION,
    description="A Megatron-LM-style GPT trainer in which communication is hidden behind compute",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_overlap", "megatron_overlap.*"]),
    package_data={"megatron_overlap": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.13",
        "numpy",
        "regex",
        "safetensors",
    ],
    extras_require={
        "demo": DEMO,
        "tensorboard": TENSORBOARD,
        "tokenizers": TOKENIZERS,
        "test": TEST,
        "dev": DEV,
    },
)
