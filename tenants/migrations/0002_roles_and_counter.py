"""The three roles as groups, and the one counter row with this database's own epoch."""

import secrets

from django.db import migrations


def add_rows(apps, schema_editor):
    for name in ("viewer", "operator", "admin"):
        apps.get_model("auth", "Group").objects.get_or_create(name=name)
    # Random per database: a version of another one, or of the one that a restore replaced,
    # is then never mistaken for ours.
    counter = apps.get_model("tenants", "Counter")
    counter.objects.get_or_create(id=1, defaults={"epoch": secrets.token_hex(6)})


class Migration(migrations.Migration):
    dependencies = [
        ("tenants", "0001_initial"),
        ("auth", "0012_alter_user_first_name_max_length"),
    ]

    # Backwards nothing: the rows go with their tables.
    operations = [migrations.RunPython(add_rows, migrations.RunPython.noop)]
