"""What happens between nodes: links, and the log they share."""

from __future__ import annotations

from mesh.errors.root import MeshError


class WireError(MeshError):
    """Root for links between nodes."""

    code = "wire_error"
    http_status = 502
    retryable = True


class BadFrame(WireError):
    """A frame broke the protocol; the link is closed after a nack with this reason."""

    code = "bad_frame"
    retryable = False


class FrameTooLarge(BadFrame):
    """A frame or tensor exceeds the limit both sides agreed on."""

    code = "frame_too_large"


class VersionMismatch(WireError):
    """The two ends speak different protocol versions."""

    code = "version_mismatch"
    retryable = False


class LinkLost(WireError):
    """The connection ended while something was still expected on it."""

    code = "link_lost"


class ConnectFailed(WireError):
    """No link could be opened in time."""

    code = "connect_failed"


class BadAdvertisement(WireError):
    """A peer's advertisement is malformed; `param` names the field. The link stays."""

    code = "bad_advertisement"
    retryable = False


class PeerRefused(WireError):
    """The node at the other end is not one to link with: its hello says so, or there is no room."""

    code = "peer_refused"
    retryable = False


class EventLogError(MeshError):
    """Root for the signed event log."""

    code = "event_log"


class BadEvent(EventLogError):
    """Bytes that are no event of this version, or a payload that cannot be one."""

    code = "bad_event"
    http_status = 400


class LogCorrupt(EventLogError):
    """The log's file is damaged beyond what a repair gives back."""

    code = "log_corrupt"


class SchemaTooOld(EventLogError):
    """The log was written by an older hearthnet, in a form that this one cannot read."""

    code = "schema_too_old"
    http_status = 409


class SchemaTooNew(EventLogError):
    """A newer hearthnet has written this log."""

    code = "schema_too_new"


class LogFull(EventLogError):
    """The disk took no more; nothing that was acknowledged is lost, reading goes on."""

    code = "log_full"
    http_status = 507
    retryable = True


class LogForked(EventLogError):
    """This node has signed two events with one sequence number; no peer takes more from it."""

    code = "log_forked"
    http_status = 409


class LogRefused(EventLogError):
    """The hearth would not take this event from this node."""

    code = "log_refused"
    http_status = 403
