"""The APIs that a gateway speaks."""

from typing import Final

from .api import Api
from .openai_chat import OpenaiChat

APIS: Final[tuple[Api, ...]] = (OpenaiChat(),)
