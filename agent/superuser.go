package agent

import (
	"context"
	"fmt"

	"github.com/alkblobs/gc-agent/internal/finding"
)

// warnSuperuser says that the agent's role is a superuser, for the first pool of each
// host: what owners attach to their tables runs with the role's rights.
func (p *Pool) warnSuperuser(ctx context.Context, s session, found *finding.List) error {
	host, ok := s.(*postgresSession)
	if !ok || !p.firstOnHost {
		return nil
	}
	var super bool
	const query = `SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user`
	if err := host.conn.QueryRow(ctx, query).Scan(&super); err != nil {
		return fmt.Errorf("look what the agent's role may do: %w", err)
	}
	if super {
		found.Add(finding.Warning, p.cfg.Path, "in database %s the agent's role is a superuser, so that whoever owns a table that it reads can act as one; "+
			"give it a role of its own: `gc-agent grants` prints what it needs", p.cfg.Host)
	}
	return nil
}
