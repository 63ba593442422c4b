#!/bin/sh
# Ray starts this script in place of HAProxy. The script changes Ray's configuration file, then starts $HAPROXY:
# - Statistics and metrics use sockets in the cluster's folder. Ray's configuration would open ports on all interfaces.
# - haproxy_defaults.cfg and haproxy_frontend.cfg are inserted.
# - Replicas get a header that turns off Ray's own detection of disconnects: three tasks per request. ApiMiddleware
#   detects them. Serve's own proxy (marked `backup`) gets no header, so it drops queued requests whose clients left.
# - HAProxy's own errors get the format of the API instead of plain text.
# After each reload, the old process finishes its requests (-sf). Ray lists these processes from the oldest to the
# latest, but the one that this reload replaces comes first. Beyond 50, the oldest end at once; each takes about 5 MiB.
here=${0%/*} config= option= old=
for argument; do
    case $argument in
        -*) option=$argument ;;
        *) case $option in
            -f) config=$argument ;;
            -sf) old="$old $argument" ;;
        esac ;;
    esac
done
end_oldest() {
    while [ $# -gt 50 ]; do
        shift
        echo "haproxy.sh: ending HAProxy process $1 and its requests, because 50 newer ones run" >&2
        kill "$1"
    done
}
end_oldest $old
folder=${config%/*}
[ -n "$config" ] && sed -i -e "/^frontend prometheus/,/mode/s#bind .*#bind unix@${folder%/*}/prometheus.sock mode 600#" \
    -e "/^listen stats/,/stats enable/s#bind .*#bind unix@${folder%/*}/stats.sock mode 600#" \
    -e "s#\(stats socket .*\) mode 666#\1 mode 600#" \
    -e "/^defaults/r $here/haproxy_defaults.cfg" \
    -e "/^frontend http_frontend/r $here/haproxy_frontend.cfg" \
    -e '/^    errorfile 50[234] /d' \
    -e '/^    # Servers in this backend\|^    # `track` allows us/{n;/ backup$/!{/^    server /i\' \
    -e '    http-request set-header x-request-disconnect-disabled ?1' -e '}}' \
    -e 's#return status 404 content-type text/plain .*#deny deny_status 404#' \
    -e 's#return status 503 .*"Ingress request router failed.*" hdr X-Serve-Reason [^ ]*#deny deny_status 503#' \
    "$config"
exec "$HAPROXY" "$@"
