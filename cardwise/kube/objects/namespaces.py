"""Namespaces."""

from typing import Final

import msgspec
from msgspec import Struct

from cardwise.kube.objects.meta import ObjectMeta


class Namespace(Struct, frozen=True, gc=False):
    metadata: ObjectMeta


decode: Final = msgspec.json.Decoder(Namespace).decode
