"""Objects of the API as decoded JSON, where nobody needs a record of their own for them."""

from typing import Any

Json = dict[str, Any]
