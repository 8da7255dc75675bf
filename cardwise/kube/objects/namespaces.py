"""Namespaces."""

from msgspec import Struct

from cardwise.kube.objects.meta import ObjectMeta


class Namespace(Struct):
    metadata: ObjectMeta
