"""`InvalidRequest`, the error for bad input: the field, the problem, and what to write instead.

Every module that reads what users write raises it, so it imports none of them.
"""


class InvalidRequest(ValueError):
    """A request that can never be served as written."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy
