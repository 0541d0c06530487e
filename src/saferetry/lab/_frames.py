"""MongoDB wire frames, as far as a proxy must understand them."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

import bson

_HEADER = struct.Struct("<iiii")  # messageLength, requestID, responseTo, opCode
_OP_QUERY = 2004  # only handshakes are still sent so
_OP_MSG = 2013
_BODY_SECTION = 0
_HANDSHAKES = frozenset({"hello", "isMaster", "ismaster"})


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole message.

    Attributes:
        data: all of its bytes, header included.
        request_id: chosen by the sender.
        response_to: in a reply, the request_id it answers.
    """

    data: bytes
    request_id: int
    response_to: int
    _op_code: int

    @property
    def command(self) -> str:
        """The first key of the command document; "" if this is no OP_MSG (compressed frames are not read)."""
        start = self._body_start()
        if start is None:
            return ""
        first_key = start + 5  # int32 length of the document, one byte for the type of its first element
        return self.data[first_key : self.data.index(b"\0", first_key)].decode()

    @property
    def is_handshake(self) -> bool:
        """Whether it is a hello in any spelling; those carry client metadata that could look like anything."""
        return self._op_code == _OP_QUERY or self.command in _HANDSHAKES

    @property
    def says_ok(self) -> bool:
        """Whether it is a reply with ok: 1."""
        start = self._body_start()
        if start is None:
            return False
        length = int.from_bytes(self.data[start : start + 4], "little")
        body: dict[str, Any] = bson.decode(self.data[start : start + length])
        return bool(body.get("ok"))

    def _body_start(self) -> int | None:
        if self._op_code != _OP_MSG:
            return None
        position = _HEADER.size + 4  # the flags
        while self.data[position] != _BODY_SECTION:  # document sequences may come before the body
            position += 1 + int.from_bytes(self.data[position + 1 : position + 5], "little")
        return position + 1


def read_frame(connection: socket.socket) -> Frame | None:
    """Read one frame; None when the other side has closed."""
    header = _read_exactly(connection, _HEADER.size)
    if header is None:
        return None
    length, request_id, response_to, op_code = _HEADER.unpack(header)
    rest = _read_exactly(connection, length - _HEADER.size)
    if rest is None:
        return None
    return Frame(header + rest, request_id, response_to, op_code)


def _read_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
