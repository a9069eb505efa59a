"""The classes of transformers by which a configuration's model is made: a causal LM's, or a multimodal one's."""

from __future__ import annotations

from typing import Any


def model_class_of(config: Any) -> Any:
    """The class that transformers lists for a configuration: a causal LM's, else a multimodal one's; None without."""
    import transformers

    listed = (
        mapping.get(type(config), None)
        for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING)
    )
    return next((model_class for model_class in listed if model_class is not None), None)


def auto_class_of(config: Any) -> Any:
    """The class of transformers by which a configuration's model is made and loaded.

    A multimodal model is loaded whole and decodes text alone: images and sounds are for its other parts.
    """
    import transformers

    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return (
        transformers.AutoModelForMultimodalLM
        if not is_causal and model_class_of(config)
        else transformers.AutoModelForCausalLM
    )
