"""A node that was taken over says whatever it likes of held shares: all that it changes is on its own cards."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import quotas
from tests.examples import examples
from tests.extender.worlds import ENDED, P100, as_card, as_pod, bound, held, resource, state, with_cards
from tests.fakes.clock import FakeClock

HONEST, LIAR = "n1", "n2"
OF = {"a": HONEST, "b": HONEST, "c": LIAR}  # where pods are bound, if they are
NAMES = sorted(OF)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("bind"), st.sampled_from(NAMES), st.sampled_from([1, 5000])),
        st.tuples(st.just("delete"), st.sampled_from(NAMES), st.booleans()),
        st.tuples(st.just("report"), st.sampled_from(NAMES), st.booleans()),
        st.tuples(st.just("lie"), st.sampled_from(["a", "b", "stranger"]), st.sampled_from([0, 1, P100, 10**12])),
        st.tuples(st.just("time"), st.sampled_from([1, 25]), st.just(None)),
    ),
    max_size=40,
)


class Pair:
    """One extender that hears the lies, and one that does not."""

    def __init__(self):
        self.clock = FakeClock()
        self.hears, self.twin = (with_cards(state(self.clock), n1=1, n2=1) for _ in range(2))
        self.pods, self.reports, self.lies = {}, {}, {}

    def bind(self, name, mem):
        if name not in self.pods and name not in self.reports:
            self.pods[name] = mem
            self._both(lambda to: to.set_pod(self._pod(name)))

    def delete(self, name, force):
        if name in self.pods:
            last = self._pod(name, **({} if force else {"deleting": True, "containers": ENDED}))
            if not force:
                self._both(lambda to: to.set_pod(last))
            del self.pods[name]
            self._both(lambda to: to.remove_pod(last))

    def report(self, name, holds):
        if holds and name in self.pods:
            self.reports[name] = held(f"uid-{name}", self.pods[name])
        elif not holds:
            self.reports.pop(name, None)
        self._tell(OF[name])

    def lie(self, name, mem):
        if mem:
            self.lies[name] = held(f"uid-{name}", mem)
        else:
            self.lies.pop(name, None)
        self._tell(LIAR)

    def time(self, seconds, _):
        self.clock.advance(seconds)
        self._both(lambda to: to.tick())

    def _pod(self, name, **how):
        return as_pod(bound(name, self.pods[name], 0, node=OF[name], **how))

    def _tell(self, node):
        reports = [one for name, one in self.reports.items() if OF[name] == node]
        more = list(self.lies.values()) if node == LIAR else []
        self.twin.set_card(*as_card(resource(0, node=node, held=reports)))
        self.hears.set_card(*as_card(resource(0, node=node, held=[*reports, *more])))

    def _both(self, act):
        act(self.hears)
        act(self.twin)


def picture(made):
    with made.view() as ledger:
        used = ledger.used("default", quotas.Entry())
        return used, ledger.node(HONEST).free, ledger.holdings(HONEST), ledger.node(LIAR).used[0]


@settings(max_examples=examples(100, soak=2000), deadline=None)
@given(steps)
def test_lies_change_nothing_but_the_liars_own_cards(history):
    pair = Pair()
    for kind, *how in history:
        getattr(pair, kind)(*how)
        (*heard, used), (*without, honest) = picture(pair.hears), picture(pair.twin)
        assert heard == without
        assert honest <= used <= honest + P100
