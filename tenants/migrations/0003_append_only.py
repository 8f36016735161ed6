"""The database itself refuses to change or delete a line of the audit."""

from django.db import migrations

POSTGRESQL = [
    """
    CREATE FUNCTION tenants_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION '% is append-only', TG_TABLE_NAME USING ERRCODE = '55000';
    END $$
    """,
    """
    CREATE TRIGGER audit_is_append_only BEFORE UPDATE OR DELETE ON tenants_auditentry
    FOR EACH ROW EXECUTE FUNCTION tenants_append_only()
    """,
]
SQLITE = [
    f"""
    CREATE TRIGGER audit_is_append_only_{verb.lower()} BEFORE {verb} ON tenants_auditentry
    BEGIN SELECT RAISE(ABORT, 'tenants_auditentry is append-only'); END
    """
    for verb in ("UPDATE", "DELETE")
]


def add_triggers(apps, schema_editor):
    for statement in POSTGRESQL if schema_editor.connection.vendor == "postgresql" else SQLITE:
        schema_editor.execute(statement, params=None)


def drop_triggers(apps, schema_editor):
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute("DROP FUNCTION tenants_append_only() CASCADE", params=None)
        return
    for verb in ("update", "delete"):
        schema_editor.execute(f"DROP TRIGGER audit_is_append_only_{verb}", params=None)


class Migration(migrations.Migration):
    dependencies = [("tenants", "0002_roles_and_counter")]

    operations = [migrations.RunPython(add_triggers, drop_triggers)]
