"""`InvalidRequest`, the error for bad input: the field, the problem, and what to write instead.

Raised by all modules that read users' input. So that they can import it, this module imports none of them.
"""

from cardwise.core.values import wording

_MAX_FIELD_BYTES = wording.MAX_BYTES // 2  # a field may contain a key that a user wrote


class InvalidRequest(ValueError):
    """A request that can never be served as written."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        field = wording.sanitize_message(field, _MAX_FIELD_BYTES)
        super().__init__(wording.sanitize_message(f"{field}: {problem}; {remedy}"))
        self.field = field
        self.problem = problem
        self.remedy = remedy
