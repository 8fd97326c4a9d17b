#!/bin/bash
# unpack.sh SUITE FOLDER PACKAGE…
# Unpack packages of a Debian suite, and all that they need, down to the C library, into FOLDER/root. Nothing is
# installed: apt gets a world of its own, in which no package is there yet.
set -euo pipefail
suite=$1 folder=$2 apt=$2/apt
shift 2

for tool in apt-get dpkg; do
    command -v $tool >/dev/null || { echo "there is no $tool here"; exit 1; }
done
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e $keys ] || { echo "there is no $keys here"; exit 1; }

# The mirror that this machine uses, if it is one of Debian.
mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null |
    grep -v '^#' | grep -oE 'https?://[^ ]+/debian/?( |$)' | head -1 | tr -d ' ') || true
mkdir -p "$apt"/{lists/partial,cache/archives/partial} "$folder/root"
: > "$apt/status"
echo "deb [signed-by=$keys] ${mirror:-http://deb.debian.org/debian} $suite main" > "$apt/sources.list"
cat > "$apt/conf" <<CONF
Dir::State::lists "$apt/lists";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::Retries "2";
Acquire::http::Timeout "20";
Debug::NoLocking "true";
CONF
export APT_CONFIG=$apt/conf
apt-get -qq --error-on=any update
apt-get -qq -y install --download-only "$@"
for package in "$apt"/cache/archives/*.deb; do
    dpkg -x "$package" "$folder/root"
done
rm -rf "$apt" "$folder"/root/usr/share/{doc,man,locale,info,i18n,lintian}
