#!/bin/sh
# Ray starts this script in place of HAProxy. The script changes Ray's configuration file, then starts $HAPROXY:
# - Statistics and metrics use sockets in the cluster's folder. Ray's configuration would open ports on all interfaces.
# - haproxy_defaults.cfg and haproxy_frontend.cfg are inserted.
# - Replicas get a header that turns off Ray's own detection of disconnects: three tasks per request. ApiMiddleware
#   detects them. Serve's own proxy (marked `backup`) gets no header, so it drops queued requests whose clients left.
# - HAProxy's own errors get OpenAI's format instead of plain text.
here=${0%/*} config= previous=
for argument; do
    [ "$previous" = -f ] && config=$argument
    previous=$argument
done
folder=${config%/*}
if [ -n "$config" ]; then
    sed -i -e "/^frontend prometheus/,/mode/s#bind .*#bind unix@${folder%/*}/prometheus.sock mode 600#" \
        -e "/^listen stats/,/stats enable/s#bind .*#bind unix@${folder%/*}/stats.sock mode 600#" \
        -e "s#\(stats socket .*\) mode 666#\1 mode 600#" \
        -e "/^defaults/r $here/haproxy_defaults.cfg" \
        -e "/^frontend http_frontend/r $here/haproxy_frontend.cfg" \
        -e '/^    # Servers in this backend\|^    # `track` allows us/{n;/ backup$/!{/^    server /i\' \
        -e '    http-request set-header x-request-disconnect-disabled ?1' -e '}}' \
        -e 's#return status 404 content-type text/plain .*#deny deny_status 404#' \
        -e 's#return status 503 .*"Ingress request router failed.*" hdr X-Serve-Reason [^ ]*#deny deny_status 503#' \
        "$config"
    body='{"error": {"message": "no replica is available; try again in a few seconds", "type": "server_error", "param": null, "code": null}}'
    printf 'HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\nContent-Length: %s\r\n\r\n%s' \
        "$(printf %s "$body" | wc -c)" "$body" > "$folder/500.http"
fi
exec "$HAPROXY" "$@"
