"""Write the API's OpenAPI document as the code makes it.

`python docs/openapi.py` rewrites openapi.json; a test keeps it in step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "openapi.json"


def document() -> str:
    """Return what /api/v1/openapi.json answers today, spelled so that a change is easy to read."""
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "platform_admin.settings")
    import django

    django.setup()
    from platform_admin.api import api

    schema = api.get_openapi_schema(path_prefix="/api/v1/")
    return json.dumps(schema, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.write_text(document())
