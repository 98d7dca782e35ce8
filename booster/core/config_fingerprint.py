"""Config fingerprint of plugins and mixed precisions, and its deprecated name."""

from __future__ import annotations

import warnings
from typing import Any


class ConfigFingerprint:
    """Base class of objects whose config is compared over ranks.

    `agreement_facts` is the deprecated name of `config_fingerprint`: a subclass that overrides it is used as if it
    overrode `config_fingerprint`. It is removed in version 0.2.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "agreement_facts" in vars(cls) and "config_fingerprint" not in vars(cls):
            warnings.warn(
                f"{cls.__qualname__}.agreement_facts() is deprecated: rename it to config_fingerprint()",
                DeprecationWarning,
                stacklevel=2,
            )
            cls.config_fingerprint = vars(cls)["agreement_facts"]  # type: ignore[method-assign]

    def config_fingerprint(self) -> list[str]:
        """Return lines of text that must be equal on all ranks, compared by every boost(); none by default."""
        return []

    def agreement_facts(self) -> list[str]:
        """Deprecated: use `config_fingerprint`."""
        warnings.warn("agreement_facts() is deprecated: call config_fingerprint()", DeprecationWarning, stacklevel=2)
        for cls in type(self).__mro__:  # the first that is not itself an alias, for calls by super()
            own = vars(cls).get("config_fingerprint")
            if own is not None and own is not vars(cls).get("agreement_facts"):
                return list(own(self))
        return []
