"""What the rules know besides the pod: settings, the cluster, the namespace."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mps import SmPercent
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import Unit
from webhook.cluster.cards import CardSizes
from webhook.cluster.gpuquotas import QuotaUsage
from webhook.cluster.limitranges import Bounds
from webhook.cluster.namespaces import Defaults
from webhook.cluster.offers import NodeOffers
from webhook.templates.spellings import NameTranslator, NvidiaGpu

AgentChoice = Literal["always", "mps", "never"]
OversizePolicy = Literal["refuse", "wait"]

DEFAULT_SCHEDULER: Final = "default-scheduler"  # the scheduler of pods that name none
AGENT_USER: Final = 65532


class Lookups(Protocol):
    """The webhook's knowledge of the cluster."""

    def defaults(self, namespace: str) -> Defaults | None:
        """The defaults of a namespace that opted in; None for others, and for namespaces that are not known yet."""

    def defaults_or_fetch(self, namespace: str) -> Defaults | None:
        """The defaults of a namespace that opted in; None for others. A namespace that is not known yet is read from
        the API server. Raises KubeError.
        """

    def cards(self, resource_class: ResourceClass | None = None, nodes: Collection[str] | None = None) -> CardSizes:
        """The sizes of the cards or devices of the class, or of all cards; `nodes`: of these nodes only."""

    def reviewed_class_cards(self, resource_class: ResourceClass) -> CardSizes | None:
        """As `cards`, for the class in a review, which any client may send; None if comparing its cards takes too
        long.
        """

    def classes(self) -> Mapping[str, ResourceClass]:
        """The known ResourceClasses, by name."""

    def resource_class(self, name: str) -> ResourceClass | None:
        """The class; None if it does not exist. Reads an unknown class from the API server. Raises KubeError."""

    def offers(self) -> NodeOffers | None:
        """The offers of the nodes; None if they are not listed yet."""

    def quotas(self, namespace: str) -> Sequence[QuotaUsage]:
        """The GPUQuotas of the namespace."""

    def has_gpu_resource_quota(self, namespace: str) -> bool:
        """Whether a ResourceQuota of the namespace counts GPUs."""

    def conflicting_member(self, namespace: str, gang: str, number: int) -> tuple[str, int] | None:
        """The name of an existing pod of the gang that names another size, and that size; None if no such pod is
        known.
        """

    def bounds(self, namespace: str) -> Bounds:
        """The bounds of the namespace's LimitRanges."""

    def mps_scopes(self) -> frozenset[str]:
        """The scopes of all MPS daemons; empty without an MPS manager."""

    def do_node_daemons_prevail(self) -> bool:
        """Whether one MPS daemon serves all GPUs on more than half of the nodes with MPS."""

    def has_kernel_limit(self) -> bool:
        """Whether the driver limits the memory of shares on any GPU."""

    def max_clients(self) -> int:
        """The maximum number of shares that any GPU takes; 0 while no GPU is known."""

    def serves_podgroups(self) -> bool:
        """Whether the cluster serves Kubernetes' PodGroups. Raises KubeError."""

    def pod(self, namespace: str, name: str, caller: str, check_size: Callable[[bytes], None]) -> Json | None:
        """The pod, from the API server; None if it cannot be read, or certainly requests nothing of Cardwise.

        caller: the address of the client; "" if it is certainly an API server.
        check_size: raises InvalidRequest for a text that is too large to be decoded.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings of the share agent.

    image: the image of the agent; "" if pods get no agent.
    user: the user ID of the agent; 0 to set none, for clusters that assign a range of user IDs to each namespace.
    """

    choice: AgentChoice = "mps"
    image: str = ""
    user: int = AGENT_USER


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """The webhook's settings.

    runtime_class: the RuntimeClass for pods that request GPUs and name none; "" for none.
    gang_schedulers: the schedulers that call the extender.
    isolation: the weakest demand that a pod which shares cards may have, in any namespace.
    sm_percent: the value for pods with a share if the pod and its namespace set no value.
    scheduler: the scheduler for pods that request GPUs and name none.
    tolerated: tolerations for pods with cards.
    min_share: MiB; smaller shares get a warning.
    callers_known: whether only the API server can call. If so, answers may show the names and the use of other objects
        in the namespace.
    unit: the unit of gpu-mem numbers without a unit, by the path, which the API server chooses.
    claims: whether shares are allocated as ResourceClaims, and no scheduler calls the extender.
    """

    runtime_class: str = ""
    oversize: OversizePolicy = "refuse"
    nvidia_gpu: NvidiaGpu = "leave"
    exempt_namespaces: frozenset[str] = frozenset()
    gang_schedulers: frozenset[str] = frozenset({DEFAULT_SCHEDULER})
    isolation: Isolation = Isolation.NONE
    sm_percent: SmPercent = SmPercent.CORE
    share_agent: AgentSettings = field(default_factory=AgentSettings)
    scheduler: str = ""
    tolerated: tuple[Json, ...] = ()
    min_share: int = 0
    callers_known: bool = True
    unit: Unit = Unit.MIB
    claims: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a rule knows besides the pod.

    defaults: the defaults of the pod's namespace; None if it has not opted in.
    gives_default_share: whether a pod without a GPU request gets the namespace's default share. True only on the path
        for namespaces with defaults.
    is_template: whether this is the pod template of a workload, and not a pod.
    """

    namespace: str
    cluster: Lookups
    settings: WebhookSettings
    defaults: Defaults | None = None
    gives_default_share: bool = False
    is_template: bool = False

    @property
    def translator(self) -> NameTranslator:
        """Translates the names of resources that users write."""
        return NameTranslator(self.cluster.resource_class, take_nvidia=self.settings.nvidia_gpu == "take")
