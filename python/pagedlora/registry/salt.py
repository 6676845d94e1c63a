"""What keeps the keys and values of one adapter, model and tenant apart from those of others."""

from __future__ import annotations

import hashlib

from pagedlora.errors import InvalidArgumentError
from pagedlora.loaders.digest import length_prefixed
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.shown import shown


def base_identity(table: ModuleTable, base_model_id: str) -> bytes:
    """Tells base models apart: by the given id, the modules' names and sizes, and the dtype.

    Raises:
        InvalidArgumentError: The id is no text.
    """
    try:
        base_model_id.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise InvalidArgumentError(
            f"base_model_id is {shown(base_model_id)}: it must be text"
        ) from error
    parts = [base_model_id, table.config.dtype.name]
    for name in table.names:
        sizes = table.sizes[name]
        parts += [name, str(sizes.in_features), str(sizes.out_features)]
    return b"".join(length_prefixed(part.encode()) for part in parts)


def check_tenant_salt(tenant_salt: object) -> None:
    """Raises InvalidArgumentError if it is not bytes."""
    if not isinstance(tenant_salt, bytes):
        raise InvalidArgumentError(f"tenant_salt is {shown(tenant_salt)}: it must be bytes")


def cache_salt(digest: str, base: bytes, tenant_salt: bytes) -> bytes:
    """SHA-256 of an adapter's digest, a base model's identity and a tenant; 32 bytes."""
    parts = (bytes.fromhex(digest), base, tenant_salt)
    return hashlib.sha256(b"".join(map(length_prefixed, parts))).digest()
