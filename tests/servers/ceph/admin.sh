#!/bin/bash
# admin.sh ROOT DATA …: radosgw-admin of the cluster that start.sh has made in DATA, for example
#   admin.sh ROOT DATA user create --uid=other --display-name=other --access-key=K --secret-key=S
set -euo pipefail
root=$1 data=$2
shift 2
. "$(dirname "${BASH_SOURCE[0]}")/../debian/world.sh"
run usr/bin/radosgw-admin -c "$data/ceph.conf" -n client.rgw "$@"
