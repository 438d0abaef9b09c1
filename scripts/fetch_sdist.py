#!/usr/bin/env python3
"""Downloads a source archive from pip's configured package index and checks its SHA-256.

usage: fetch_sdist.py PROJECT ARCHIVE SHA256 FOLDER

`pip download` of a source archive first builds the project's metadata, which takes a minute and installs a build
system; here only the file is wanted. The index is the one that pip would use (its configuration files and PIP_INDEX_URL).
"""
import hashlib
import json
import os
import re
import ssl
import subprocess
import sys
import urllib.parse
import urllib.request

BLOCK = 1 << 20


def pip_settings():
    """pip's effective settings, environment included, by their last part: {'index-url': ..., 'cert': ...}."""
    listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    return {key.split(".")[-1]: value for key, value in re.findall(r"^(\S+?)='(.*)'$", listing, re.M)}


def index_url(settings):
    if "index-url" in settings:
        return settings["index-url"]
    from pip._internal.models.index import PyPI  # the default that pip itself falls back to

    return PyPI.simple_url


def open_url(url, settings, accept="*/*"):
    context = ssl.create_default_context(cafile=settings.get("cert"))
    request = urllib.request.Request(url, headers={"Accept": accept})
    return urllib.request.urlopen(request, context=context, timeout=float(settings.get("timeout", 60)))


def archive_url(project, archive, settings):
    """Address of the archive in the index's page of the project, whether that is JSON or HTML."""
    page_url = index_url(settings).rstrip("/") + f"/{project}/"
    with open_url(page_url, settings, "application/vnd.pypi.simple.v1+json, text/html;q=0.1") as answer:
        page, page_url = answer.read().decode(), answer.url
    if page.lstrip().startswith("{"):
        links = [file["url"] for file in json.loads(page)["files"]]
    else:
        links = re.findall(r'href="([^"]+)"', page)
    for link in links:
        url = urllib.parse.urljoin(page_url, link).split("#")[0]
        if urllib.parse.unquote(url).endswith("/" + archive):
            return url
    raise LookupError(f"the package index has no {archive} in its page of {project}")


def download(url, path, settings):
    with open_url(url, settings) as answer, open(path, "wb") as out:
        while block := answer.read(BLOCK):
            out.write(block)


def download_with_pip(project, archive, folder):
    version = archive.removesuffix(".tar.gz").rsplit("-", 1)[1]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", folder]
    subprocess.run([*command, f"{project}=={version}"], check=True)


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def main(project, archive, sha256, folder):
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, archive)
    if os.path.exists(path) and sha256_of(path) == sha256:
        print(f"    already downloaded: {path}")
        return
    partial = path + ".partial"
    settings = pip_settings()
    try:
        download(archive_url(project, archive, settings), partial, settings)
        os.replace(partial, path)
    except (OSError, LookupError, ValueError) as error:
        print(f"    the direct way failed ({error}); asking pip, which is slower", file=sys.stderr)
        download_with_pip(project, archive, folder)
    found = sha256_of(path)
    if found != sha256:
        os.remove(path)
        sys.exit(f"fetch_sdist.py: {archive} has SHA-256 {found}, expected {sha256}; try again, or report it")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
