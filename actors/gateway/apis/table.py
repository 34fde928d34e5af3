"""The APIs that a gateway speaks."""

from typing import Final

from .anthropic_messages import AnthropicMessages
from .api import Api
from .openai_chat import OpenaiChat
from .openai_completions import OpenaiCompletions
from .openai_responses import OpenaiResponses

APIS: Final[tuple[Api, ...]] = (OpenaiChat(), OpenaiCompletions(), OpenaiResponses(), AnthropicMessages())
