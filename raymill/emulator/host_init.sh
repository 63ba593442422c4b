#!/bin/bash
# PID 1 of a host. It starts in new namespaces (network, mount, PID, IPC, UTS). Its first argument is a folder with the
# files `layers` (the overlay's lower layers), `shared`, `hostname`, `hosts`, `authorized_keys`, `user-data`, `gpus` (their
# number) and `nvme` (empty if the instance type has no NVMe disks). It mounts the overlay as its root, waits until the
# cloud connects the network card eth0, starts sshd and the instance's user data, and reaps orphans.
set -eu
folder=$1 private=$2 public=$3 gateway=$4
root=$folder/root

mount --make-rprivate /
mkdir -p "$root" "$folder/upper" "$folder/work"
mount -t overlay overlay -o "lowerdir=$(cat "$folder/layers"),upperdir=$folder/upper,workdir=$folder/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
rm -rf "$folder/tmp" # /tmp is on the disk, and empty after a reboot
mkdir -m 1777 "$folder/tmp"
mount --bind "$folder/tmp" "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm" "$root/run/sshd"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
while read -r shared; do # folders on other file systems than /, mounted read-only
    mkdir -p "$root$shared"
    mount --rbind -o ro "$shared" "$root$shared"
done < "$folder/shared"

hostname "$(cat "$folder/hostname")"
cp "$folder/gpus" "$root/etc/gpus"
cp "$folder/nvme" "$root/etc/nvme"
cp "$folder/hosts" "$root/etc/hosts"
: > "$root/etc/resolv.conf"
install -o 1500 -g 1500 -m 600 "$folder/authorized_keys" "$root/home/ubuntu/.ssh/authorized_keys"
[ ! -s "$folder/user-data" ] || install -m 700 "$folder/user-data" "$root/var/user-data"

until ip link show eth0 > /dev/null 2>&1; do sleep 0.05; done
ip link set lo up
ip addr add "$private/16" dev eth0
# EC2 translates public to private addresses; an emulated host has both
[ -z "$public" ] || ip addr add "$public/32" dev eth0
ip link set eth0 up
ip route add 169.254.169.254 dev eth0 # the metadata service answers in every subnet
# onlink: the gateway is AWS's side of the bridge, outside of the VPC's addresses
[ -z "$gateway" ] || ip route add default via "$gateway" dev eth0 onlink

mkdir "$root/.old"
cd "$root"
pivot_root . .old
umount -l /.old
rmdir /.old
trap 'exit 0' USR1 # the image's `shutdown` sends this; every process of the host ends with PID 1
trap : TERM INT HUP
set -a; . /etc/rehearsal-environment; set +a
if [ -s /etc/nvme ]; then # as on AWS, a service of the image mounts the NVMe disks while ssh works already
    { sleep 6 && mkdir -p /opt/dlami/nvme && mount -t tmpfs tmpfs /opt/dlami/nvme; } &
fi
/usr/sbin/sshd -E /var/log/sshd.log
if [ ! -e /var/lib/cloud ]; then # the first boot
    mkdir -p /var/lib/cloud/scripts/per-boot
    [ ! -s /var/user-data ] || /var/user-data > /var/log/cloud-init-output.log 2>&1 &
else
    for script in /var/lib/cloud/scripts/per-boot/*; do "$script"; done
fi
while :; do
    sleep 3600 &
    wait "$!" || true
done
