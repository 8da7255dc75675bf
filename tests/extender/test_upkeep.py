"""The loop: what fails once is done at the next round."""

from cardwise.core import names
from cardwise.kube import errors
from extender.upkeep import Upkeep
from tests.extender.worlds import Clock, as_card, refuse, resource, state, with_cards


class FakeApi:
    def __init__(self, *answers):
        self.answers = list(answers)
        self.touched = []

    def patch(self, path, patch, kind, *, timeout):
        self.touched.append((path, patch))
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            raise answer


def test_a_touch_that_failed_is_tried_again():
    clock = Clock()
    made = with_cards(state(clock), n1=1)
    made.touch_due()
    refuse(made)
    made.set_card(*as_card(resource(0, health="Unhealthy")))
    made.set_card(*as_card(resource(0)))
    api = FakeApi(errors.Unreachable("timed out"), errors.ServerError(500, "InternalError", ""))
    upkeep = Upkeep(api, made)
    for _ in range(4):
        upkeep.step()
        clock.now += 1.5
    assert [path for path, _ in api.touched] == ["/api/v1/nodes/n1"] * 3
    assert names.NODE_CHANGED in api.touched[-1][1]["metadata"]["annotations"]
