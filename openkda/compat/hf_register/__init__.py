"""Our models behind transformers' Auto classes, on the published checkpoint directories.

    from openkda.compat.hf_register import register
    register()
    model = AutoModelForCausalLM.from_pretrained(DIR)       # a Kimi Linear or Kimi K3 directory
    model.generate(...); model.save_pretrained(OUT)         # OUT has the published layout again
    tokenizer = AutoTokenizer.from_pretrained(DIR)          # tiktoken.model; its chat template is XTML
    processor = AutoProcessor.from_pretrained(DIR)          # of Kimi K3: the same with pictures

transformers 5.17 and later has a model of its own for `kimi_linear`; after `register()` the Auto classes give ours.
"""

from __future__ import annotations

import importlib


def need_transformers() -> None:
    """ImportError with the remedy where transformers is not installed."""
    try:
        importlib.import_module("transformers")
    except ModuleNotFoundError as missing:
        if missing.name != "transformers":
            raise
        raise ImportError("this needs transformers, 5.17 to below 6: pip install 'openkda[hf]'") from None


def register() -> None:
    """Put our configs, models, tokenizer and processor into transformers' Auto classes. Calling it twice changes nothing.

    Raises: ImportError where transformers is missing or older than 5.17.
    """
    need_transformers()
    from openkda.compat.hf_register import config, modeling, processor, tokenizer, versions

    versions.check()
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
    )

    for config_class, model_class in (
        (config.KimiLinearConfig, modeling.KimiLinearForCausalLM),
        (config.KimiK3Config, modeling.KimiK3ForConditionalGeneration),
    ):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
        AutoTokenizer.register(config_class, tokenizer.TikTokenTokenizer, exist_ok=True)
    for auto in (
        AutoModel,
        AutoModelForImageTextToText,
    ):  # AutoModel, because the published auto_map names this class for it
        auto.register(config.KimiK3Config, modeling.KimiK3ForConditionalGeneration, exist_ok=True)
    AutoProcessor.register(config.KimiK3Config, processor.KimiK3Processor, exist_ok=True)
