"""`InvalidRequest`, the error for what a user wrote and can never be: field, problem, remedy.

Every module that reads what users write raises it, so it imports none of them.
"""


class InvalidRequest(ValueError):
    """A request that can never be served as written."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy
