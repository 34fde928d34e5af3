"""The files of a saved policy; those of config and tokenizer, which transformers names, are beside them."""

from typing import Final

WEIGHTS_FILE: Final = "model.safetensors"  # the name transformers looks for
ADAPTER_FILE: Final = "adapter_model.safetensors"  # in its place, for a LoRA policy: the names peft looks for
ADAPTER_CONFIG_FILE: Final = "adapter_config.json"
STATE_FILE: Final = "training_state.safetensors"
REFERENCE_FILE: Final = "reference.safetensors"
CRITIC_FILE: Final = "critic.safetensors"
POSITION_FILE: Final = "training_state.json"

TRAINING_FILES: Final = (STATE_FILE, REFERENCE_FILE, CRITIC_FILE, POSITION_FILE)
"""The files that only a continuation of the training needs."""
