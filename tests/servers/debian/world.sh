# Read by other scripts, with $root (where unpack.sh has unpacked): `run usr/bin/PROGRAM …` runs a program from
# there, with the loader and the libraries from there too.
libraries=$(echo "$root"/usr/lib/*-linux-gnu)
path=$libraries:$root/lib/${libraries##*/}:$libraries/ceph:$libraries/ceph/denc
loader=$(find "$root" -maxdepth 4 -name 'ld-linux*.so.*' -print -quit)
run() {
    local program=$1
    shift
    "$loader" --library-path "$path" "$root/$program" "$@"
}
