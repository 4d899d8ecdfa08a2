package torture_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

const (
	// publication is of the test's own database.
	publication = "torture"
	// prefix marks what writers say in the log.
	prefix = "torture"
)

// wal streams what is committed, in the order of the commit records.
type wal struct {
	conn      *pgconn.PgConn
	relations map[uint32]*pglogrepl.RelationMessage
	current   transaction
	applied   pglogrepl.LSN
}

// openWAL begins a stream of the tables' changes from here on. The connection must
// be one for replication.
func openWAL(ctx context.Context, q pgdb.Querier, conn *pgconn.PgConn, slot string, tables []string) (*wal, error) {
	if _, err := q.Exec(ctx, `CREATE PUBLICATION `+publication+` FOR TABLE `+strings.Join(tables, ", ")); err != nil {
		return nil, fmt.Errorf("create the publication: %w", err)
	}
	if _, err := q.Exec(ctx, `SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, slot); err != nil {
		return nil, fmt.Errorf("create the replication slot: %w", err)
	}
	err := pglogrepl.StartReplication(ctx, conn, slot, 0, pglogrepl.StartReplicationOptions{
		PluginArgs: []string{"proto_version '1'", "publication_names '" + publication + "'", "messages 'true'"},
	})
	if err != nil {
		return nil, fmt.Errorf("start replication: %w", err)
	}
	return &wal{conn: conn, relations: map[uint32]*pglogrepl.RelationMessage{}}, nil
}

// stream hands every transaction to fn, until ctx ends, which is no error.
func (w *wal) stream(ctx context.Context, fn func(transaction)) error {
	for {
		received, err := w.conn.ReceiveMessage(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			err = w.receive(ctx, received, fn)
		}
		if err != nil {
			return fmt.Errorf("read the write-ahead log: %w", err)
		}
	}
}

func (w *wal) receive(ctx context.Context, received pgproto3.BackendMessage, fn func(transaction)) error {
	data, ok := received.(*pgproto3.CopyData)
	if !ok {
		return fmt.Errorf("unexpected message %T: %+v", received, received)
	}
	switch data.Data[0] {
	case pglogrepl.PrimaryKeepaliveMessageByteID:
		alive, err := pglogrepl.ParsePrimaryKeepaliveMessage(data.Data[1:])
		if err != nil || !alive.ReplyRequested {
			return err
		}
		return pglogrepl.SendStandbyStatusUpdate(ctx, w.conn, pglogrepl.StandbyStatusUpdate{WALWritePosition: w.applied})
	case pglogrepl.XLogDataByteID:
		x, err := pglogrepl.ParseXLogData(data.Data[1:])
		if err != nil {
			return err
		}
		message, err := pglogrepl.Parse(x.WALData)
		if err != nil {
			return err
		}
		return w.message(message, fn)
	default:
		return fmt.Errorf("unexpected data %q", data.Data[0])
	}
}

func (w *wal) message(message pglogrepl.Message, fn func(transaction)) error {
	switch m := message.(type) {
	case *pglogrepl.BeginMessage:
		w.current = transaction{at: m.CommitTime.UnixNano()}
	case *pglogrepl.RelationMessage:
		w.relations[m.RelationID] = m
	case *pglogrepl.InsertMessage:
		return w.change(m.RelationID, m.Tuple, false)
	case *pglogrepl.UpdateMessage:
		return w.change(m.RelationID, m.NewTuple, false)
	case *pglogrepl.DeleteMessage:
		return w.change(m.RelationID, m.OldTuple, true)
	case *pglogrepl.LogicalDecodingMessage:
		if m.Prefix == prefix {
			return json.Unmarshal(m.Content, &w.current.writer)
		}
	case *pglogrepl.CommitMessage:
		fn(w.current)
		w.applied = m.TransactionEndLSN
	default:
		return fmt.Errorf("unexpected message %s", m.Type())
	}
	return nil
}

func (w *wal) change(relation uint32, tuple *pglogrepl.TupleData, gone bool) error {
	r, ok := w.relations[relation]
	if !ok || len(r.Columns) != len(tuple.Columns) {
		return fmt.Errorf("relation %d isn't known", relation)
	}
	c := change{pool: strings.TrimPrefix(r.Namespace, ownSchema), table: r.RelationName, gone: gone, row: map[string]string{}}
	for i, column := range tuple.Columns {
		if column.DataType == pglogrepl.TupleDataTypeText {
			c.row[r.Columns[i].Name] = string(column.Data)
		}
	}
	w.current.changes = append(w.current.changes, c)
	return nil
}

// say is the statement by which a writer notes, in the log and with its
// transaction, what it relies on. It returns the transaction's id.
const say = `SELECT pg_current_xact_id()::text FROM pg_logical_emit_message(true, '` + prefix + `', $1)`

// outcome says whether a transaction that has an id was committed, once it has
// ended.
func outcome(ctx context.Context, q pgdb.Querier, xid string) (committed bool, err error) {
	for {
		var status string
		if err := q.QueryRow(ctx, `SELECT pg_xact_status($1::xid8)`, xid).Scan(&status); err != nil {
			return false, fmt.Errorf("ask for the outcome of transaction %s: %w", xid, err)
		}
		if status != "in progress" {
			return status == "committed", nil
		}
		if err := pause(ctx, poll); err != nil {
			return false, err
		}
	}
}
