package pgdb

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// How long either end goes on believing in a peer that has vanished without a word:
// its machine has lost its power, a cable or a firewall swallows everything. 60
// seconds, and checkInterval more where the server is busy with a statement.
const (
	keepaliveIdle     = 30 * time.Second
	keepaliveInterval = 10 * time.Second
	keepaliveCount    = 3
	// Keepalives are sent only while nothing waits to be acknowledged. Without this
	// limit what was sent last would be sent again for a quarter of an hour.
	userTimeout = keepaliveIdle + keepaliveCount*keepaliveInterval
	// A server that runs a statement reads nothing, and so doesn't hear that its
	// client has ended.
	checkInterval = 2 * time.Second
)

func dialer() *net.Dialer {
	return &net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: keepaliveIdle, Interval: keepaliveInterval, Count: keepaliveCount},
		Control:         limitUnacknowledged,
	}
}

// peerSettings are the server's, with the agent's values. A parameter of that name
// in the URL is left as it is.
// https://www.postgresql.org/docs/15/runtime-config-connection.html
var peerSettings = map[string]string{
	"tcp_keepalives_idle":     seconds(keepaliveIdle),
	"tcp_keepalives_interval": seconds(keepaliveInterval),
	"tcp_keepalives_count":    strconv.Itoa(keepaliveCount),
	"tcp_user_timeout":        ms(userTimeout),
	checkIntervalSetting:      ms(checkInterval),
}

// checkIntervalSetting is the one that not every server's system has.
const checkIntervalSetting = "client_connection_check_interval"

func seconds(d time.Duration) string { return strconv.Itoa(int(d.Seconds())) }

// configurePeer makes the server notice in bounded time that this process is gone,
// however it went: until then the session keeps its locks, the lease among them.
func configurePeer(ctx context.Context, conn *pgx.Conn) error {
	var names, values []string
	for name, value := range peerSettings {
		if _, given := conn.Config().RuntimeParams[name]; !given && name != checkIntervalSetting {
			names, values = append(names, name), append(values, value)
		}
	}
	const set = "SELECT pg_catalog.set_config(s.name, s.value, false) FROM unnest($1::text[], $2::text[]) AS s (name, value)"
	if _, err := conn.Exec(ctx, set, unprepared, names, values); err != nil {
		return fmt.Errorf("set how long a silent connection lives: %w", err)
	}
	if _, given := conn.Config().RuntimeParams[checkIntervalSetting]; given {
		return nil
	}
	_, err := conn.Exec(ctx, "SELECT pg_catalog.set_config($1, $2, false)", unprepared, checkIntervalSetting, peerSettings[checkIntervalSetting])
	// Where the server's system can't look for that, the server notices when its
	// statement ends, which statement_timeout sees to: later, and as safe.
	if err != nil && Code(err) != InvalidParameterValue {
		return fmt.Errorf("set %s: %w", checkIntervalSetting, err)
	}
	return nil
}
