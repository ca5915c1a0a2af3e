"""The policies that tagc ships, one YAML file each.

``tagc.policies()`` lists them. Importing this package binds the same name, so the module is
callable, too: it answers like the function.
"""

import sys
import types


class _CallableModule(types.ModuleType):
    def __call__(self) -> dict[str, str]:
        from tagc.policy.policy import policies

        return policies()


sys.modules[__name__].__class__ = _CallableModule
