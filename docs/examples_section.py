"""Show `Example:` in a docstring as code: griffe knows the section `Examples:`, and takes the singular for a remark."""

import re
from typing import Any

from griffe import Extension, Object


class ExamplesSection(Extension):
    """Rename the section before docstrings are parsed."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^( *)Example:$", r"\1Examples:", obj.docstring.value)
