"""Settings. Everything that differs between installations is an environment variable.

Without any, the embedded default runs: SQLite and Celery's filesystem broker below
SWITCHYARD_HOME, on one machine.
"""

from __future__ import annotations

import os
import secrets
from importlib.util import find_spec
from pathlib import Path

import dj_database_url
from csp.constants import NONE, SELF

BASE_DIR = Path(__file__).resolve().parent.parent
# Where the embedded default keeps its database, broker and secret key.
HOME = Path(os.environ.get("SWITCHYARD_HOME", BASE_DIR / "var"))


def _secret_key() -> str:
    """Return SECRET_KEY, or this installation's own, made once and readable by its owner only."""
    if key := os.environ.get("SECRET_KEY"):
        return key
    path = HOME / "secret_key"
    HOME.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text()
    with os.fdopen(descriptor, "w") as file:
        file.write(key := secrets.token_urlsafe(48))
    return key


SECRET_KEY = _secret_key()
DEBUG = False
# Which host names the pages answer to; the embedded default answers this machine only.
ALLOWED_HOSTS = os.environ.get("ALLOWED_HOSTS", "127.0.0.1,localhost,[::1]").split(",")
# True behind a TLS proxy: cookies travel over HTTPS only, plain HTTP is redirected.
HTTPS = os.environ.get("SWITCHYARD_HTTPS") == "1"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "django_htmx",
    "csp",
    "tenants",
    "capacity",
    "migrations_app",
    "platform_admin",
]

MIDDLEWARE = [
    "platform_admin.middleware.request_id_middleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "platform_admin.middleware.SaneSession",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    # Every page needs a sign-in unless its view says otherwise (@login_not_required).
    "platform_admin.middleware.SignInRequired",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]

ROOT_URLCONF = "platform_admin.urls"
WSGI_APPLICATION = "platform_admin.wsgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "platform_admin.context.operator_page",
            ]
        },
    }
]

DATABASES = {
    "default": dj_database_url.parse(
        os.environ.get("DATABASE_URL") or f"sqlite:///{HOME / 'switchyard.sqlite3'}",
        conn_max_age=60,
        # A server that was restarted costs a new connection, not each thread's next page.
        conn_health_checks=True,
    )
}
if DATABASES["default"]["ENGINE"].endswith("sqlite3"):
    DATABASES["default"]["OPTIONS"] = {
        # IMMEDIATE: a transaction is the one writer from its start, so reading a row
        # and then writing by it is sound without row locks.
        "transaction_mode": "IMMEDIATE",
        # WAL: readers never wait for the writer. FULL: a decision survives a power cut.
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;",
        "timeout": 20,
    }
    DATABASES["default"]["TEST"] = {"NAME": HOME / "test.sqlite3"}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# A claim on a row holds this long (seconds); past it another worker takes over.
DURABLE_LEASE_SECONDS = float(os.environ.get("DURABLE_LEASE_SECONDS", "30"))
# A step that hangs is killed well before its claim's lease ends (seconds).
DURABLE_STEP_SECONDS = DURABLE_LEASE_SECONDS * 2 / 3
# How long a runtime may start turns without hearing from us (seconds).
RUNTIME_LEASE_SECONDS = float(os.environ.get("RUNTIME_LEASE_SECONDS", "900"))

# How long reported usage is kept once it is in the ledger (days): what an invoice is checked
# against line by line.
USAGE_LINES_KEPT_DAYS = float(os.environ.get("USAGE_LINES_KEPT_DAYS", "35"))
# The same of the ledger's minutes. Its days are kept for good.
USAGE_MINUTES_KEPT_DAYS = float(os.environ.get("USAGE_MINUTES_KEPT_DAYS", "100"))

# What steps of side channels may call: modules, whose callables and those below them may be, and
# a folder of programs. Neither is chosen on a page, so that nobody there runs what they like.
CHANNEL_MODULES = [
    name.strip()
    for name in os.environ.get("SWITCHYARD_CHANNEL_MODULES", "").split(",")
    if name.strip()
]
# None: no programs.
CHANNEL_COMMANDS = (
    Path(os.environ["SWITCHYARD_CHANNEL_COMMANDS"])
    if os.environ.get("SWITCHYARD_CHANNEL_COMMANDS")
    else None
)
# Variables of ours that calls are given beside what any program needs (PATH, HOME, TZ, ...).
CHANNEL_VARIABLES = [
    name.strip()
    for name in os.environ.get("SWITCHYARD_CHANNEL_VARIABLES", "").split(",")
    if name.strip()
]

# The release that runs here, for what is kept of tests of it. Empty: nobody has said.
BUILD = os.environ.get("SWITCHYARD_BUILD", "")[:100]

REDIS_URL = os.environ.get("REDIS_URL", "")
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": REDIS_URL,
    }
    if REDIS_URL
    else {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
}

LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "overview"
LOGOUT_REDIRECT_URL = "login"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en-us"
USE_THOUSAND_SEPARATOR = True

STATIC_URL = "static/"
STATIC_ROOT = HOME / "static"
STATICFILES_DIRS = [
    BASE_DIR / "static",
    # Plotly's JavaScript as its package ships it; found, not imported: importing takes a second.
    ("plotly", Path(find_spec("plotly").origin).parent / "package_data"),
]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}
# Serve straight from the finders: no collectstatic step between two commands.
WHITENOISE_USE_FINDERS = True

CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "img-src": [SELF, "data:"],
        "object-src": [NONE],
        "base-uri": [NONE],
        "frame-ancestors": [NONE],
        "form-action": [SELF],
    }
}
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE_SSL_REDIRECT = HTTPS
# Probes come from the load balancer itself, without TLS.
SECURE_REDIRECT_EXEMPT = [r"^healthz$", r"^readyz$"]
SECURE_HSTS_SECONDS = 31_536_000 if HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = HTTPS
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if HTTPS else None
X_FRAME_OPTIONS = "DENY"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": os.environ.get("LOG_LEVEL", "INFO")},
}
