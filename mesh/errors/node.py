"""Settings, the running daemon and its identity."""

from __future__ import annotations

from mesh.errors.root import MeshError


class ConfigError(MeshError):
    """Root for settings that cannot be used."""

    code = "bad_config"
    http_status = 400


class BadValue(ConfigError):
    """A setting has a value of the wrong form."""

    code = "bad_value"


class UnknownKey(ConfigError):
    """A setting or field nobody knows."""

    code = "unknown_key"


class NotRunning(MeshError):
    """No daemon answers at the expected address."""

    code = "not_running"
    http_status = 503
    retryable = True


class AlreadyRunning(MeshError):
    """A daemon already uses this state directory."""

    code = "already_running"
    http_status = 409


class PortInUse(MeshError):
    """Something else listens on the wanted port."""

    code = "port_in_use"
    http_status = 409


class IdentityError(MeshError):
    """Root for this node's own key."""

    code = "identity_error"


class KeyUnreadable(IdentityError):
    """The node key cannot be read, or others on this machine could read it too."""

    code = "key_unreadable"


class BadKey(IdentityError):
    """The key file holds something else than one Ed25519 private key."""

    code = "bad_key"


class UntrustedPeer(IdentityError):
    """The node at the other end did not prove that it is the member it should be."""

    code = "untrusted_peer"
    http_status = 403


class PairingRejected(IdentityError):
    """Pairing failed; `param` says at what: code, window, busy, protocol, timeout, refused."""

    code = "pairing_rejected"
    http_status = 403


class TokenRejected(IdentityError):
    """A capability token does not entitle its holder; `param` names the check that failed."""

    code = "token_rejected"
    http_status = 401
