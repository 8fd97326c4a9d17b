#!/bin/bash
# start.sh ROOT DATA PORT MONITOR_PORT KEY SECRET [SSL_PORT]
# A monitor, an object store in memory (4 GiB at most) and an S3 gateway, on 127.0.0.1, until one of them ends.
# DATA/ready appears once there is a user with KEY and SECRET. With SSL_PORT, DATA/cert.pem and DATA/key.pem are its.
set -euo pipefail
root=$1 data=$2 port=$3 monitor=$4 key=$5 secret=$6 ssl=${7:-}
. "$(dirname "${BASH_SOURCE[0]}")/../debian/world.sh"

mkdir -p "$data"/{mon,osd,run,log}
cluster=$(cat /proc/sys/kernel/random/uuid)
cat > "$data/ceph.conf" <<CONF
[global]
fsid = $cluster
mon_host = v2:127.0.0.1:$monitor
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
ms_mon_client_mode = crc
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
run_dir = $data/run
admin_socket = $data/run/\$name.asok
log_file = $data/log/\$name.log
mon_cluster_log_file = $data/log/cluster.log
plugin_dir = $libraries/ceph
erasure_code_dir = $libraries/ceph/erasure-code
osd_class_dir = $libraries/rados-classes
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 500
mon_data_avail_crit = 1
mon_data_avail_warn = 2
# A change of the cluster, of which there are a dozen at the start, is not held back for a second to meet others.
paxos_propose_interval = 0.02
paxos_min_wait = 0.01

[mon.a]
mon_data = $data/mon

[osd.0]
osd_data = $data/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_journal =
osd_fast_shutdown = true
osd_mclock_skip_benchmark = true
osd_memory_target = 939524096

[client.rgw]
rgw_data = $data
rgw_frontends = beast endpoint=127.0.0.1:$port${ssl:+ ssl_endpoint=127.0.0.1:$ssl ssl_certificate=$data/cert.pem ssl_private_key=$data/key.pem}
rgw_thread_pool_size = 64
rgw_enable_ops_log = false
rgw_enable_usage_log = false
debug_rgw = 0/0
rgw_run_sync_thread = false
rgw_enable_lc_threads = false
# What is deleted gives its memory back soon.
rgw_gc_obj_min_wait = 2
rgw_gc_processor_period = 5
rgw_gc_processor_max_time = 5
CONF
conf=(-c "$data/ceph.conf")

# The command-line tool is written in Python, and has to be run by the Python that came with it.
python=$(basename "$(ls "$root"/usr/bin/python3.?? | head -1)")
tool() {
    PYTHONHOME=$root/usr PYTHONPATH=$root/usr/lib/python3/dist-packages \
        run "usr/bin/$python" "$root/usr/bin/ceph" "${conf[@]}" --connect-timeout 30 "$@"
}

run usr/bin/monmaptool --create --fsid "$cluster" --addv a "[v2:127.0.0.1:$monitor]" "$data/monmap"
run usr/bin/ceph-mon "${conf[@]}" -i a --mkfs --monmap "$data/monmap"
run usr/bin/ceph-mon "${conf[@]}" -i a -f &
store=$(cat /proc/sys/kernel/random/uuid)
run usr/bin/ceph-osd "${conf[@]}" -i 0 --mkfs --osd-uuid "$store"
tool osd new "$store" 0
run usr/bin/ceph-osd "${conf[@]}" -i 0 -f &
# Before the gateway runs: else its cache would be asked to forget the user, and be waited for for seconds.
bash "$(dirname "${BASH_SOURCE[0]}")/admin.sh" "$root" "$data" user create --uid=test --display-name=test \
    --access-key="$key" --secret="$secret"
run usr/bin/radosgw "${conf[@]}" -n client.rgw -f &
touch "$data/ready"
wait -n
