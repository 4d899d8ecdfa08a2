/*
 * The protocol of a sweep and of the writers that it must not hurt, about one key.
 * README.md in this directory says what stands here and what doesn't.
 *
 * Each of these is a protection. 0 takes it out, and the search must then find a
 * blob that is lost, or whatever else the protection is there for.
 */
#ifndef KEY_LOCK
#define KEY_LOCK 1 /* an arbitration tries the lock of the key */
#endif
#ifndef PUT_LOCK
#define PUT_LOCK 1 /* a joint put takes the lock of the key before it looks */
#endif
#ifndef BLOB_LOCK
#define BLOB_LOCK 1 /* a batch locks the blob's row before it looks at the sources */
#endif
#ifndef FOREIGN_KEY_LOCK
#define FOREIGN_KEY_LOCK 1 /* the check of a foreign key locks the row that it finds */
#endif
#ifndef PIN_LOCK
#define PIN_LOCK 1 /* an arbitration locks the rows of pins, expired or not */
#endif
#ifndef RENEWAL_LOCK
#define RENEWAL_LOCK 1 /* a renewal locks its row before it reads the clock */
#endif
#ifndef COMMIT_CHECK
#define COMMIT_CHECK 1 /* a transaction whose pin has expired by its commit fails */
#endif
#ifndef PINS_FIRST
#define PINS_FIRST 1 /* pins are read before the sources */
#endif
#ifndef ONE_SESSION
#define ONE_SESSION 1 /* the lease and the deletes are of one session */
#endif
#ifndef ONE_TRANSACTION
#define ONE_TRANSACTION 1 /* take, delete and putting back are one transaction */
#endif

/* 0: blobs that aren't rows, so that nothing of theirs can be locked or referred to by a foreign key. */
#ifndef ROWS
#define ROWS 1
#endif

#ifndef SWEEPS
#define SWEEPS 1 /* that each sweeper begins at most */
#endif

/* Sessions. Nobody is 0. */
#define SWEEPER_1 1
#define SWEEPER_2 2
#define WRITER_1  3
#define WRITER_2  4
#define bit(writer) (1 << writer)

/* What a pin is, to whoever sees it. A row that a transaction hasn't changed is SAME to it. */
#define NONE    0
#define LIVE    1
#define EXPIRED 2
#define SAME    3

/* References: with a foreign key, and without. */
#define KEYED 1
#define LOOSE 2

/* The blob: is it there, for everybody; who has changed that in a transaction that is open, and to what. */
bool blob, blob_new;
byte blob_by;
byte blob_update; /* who has its row FOR UPDATE */
byte blob_share;  /* the writers that have it FOR KEY SHARE */

/* The key's row in the window, likewise. Whether it is due is anybody's guess. */
bool window;
byte window_by;

byte key_exclusive, key_shared; /* the advisory lock of the key */
byte lease;

/* The pin and the reference of each writer. Nobody else writes them. */
byte pin[2], pin_new[2], pin_locked_by[2];
byte ref[2], ref_new[2];

bool ended[5]; /* sessions that have been ended, and whose process hasn't noticed */
byte finished;

/* What mustn't be. */
bool lost;         /* somebody was told yes, or has a live pin, and the blob isn't there */
bool hollow;       /* somebody was told yes for a pin that had expired */
bool unauthorised; /* a delete without the lease */
bool forgotten;    /* a row has left the window, and its blob neither is gone nor was it referred to */
bool owed;         /* the key belongs into the window */

#define referred (ref[0] || ref[1])
#define pinned   (pin[0] == LIVE || pin[1] == LIVE)
#define sees(me) ((blob_by == me && blob_new) || (blob_by != me && blob))
#define other(holder, me) (holder != 0 && holder != me)

/* Frees what a session's transaction holds. What it has changed was published before, or is undone by this. */
inline free(me) {
	if :: blob_by == me -> blob_by = 0; blob_new = false :: else fi;
	if :: blob_update == me -> blob_update = 0 :: else fi;
	if :: window_by == me -> window_by = 0 :: else fi;
	if :: key_exclusive == me -> key_exclusive = 0 :: else fi;
	if :: pin_locked_by[0] == me -> pin_locked_by[0] = 0 :: else fi;
	if :: pin_locked_by[1] == me -> pin_locked_by[1] = 0 :: else fi
}

inline free_writer(w) {
	free(w + WRITER_1);
	blob_share = blob_share & ~bit(w);
	key_shared = key_shared & ~bit(w);
	pin_new[w] = SAME;
	ref_new[w] = SAME
}

#define in_transaction(w) (key_shared & bit(w) || blob_share & bit(w) || blob_by == w + WRITER_1 || \
	pin_locked_by[w] == w + WRITER_1 || ref_new[w] != SAME)

/* A session ends without a word: the server rolls back, and frees the lease. */
inline end_sweeper(me) {
	free(me);
	if :: lease == me -> lease = 0 :: else fi;
	ended[me] = true
}

inline end_writer(w) {
	free_writer(w);
	ended[w + WRITER_1] = true
}

/*
 * A writer's transaction. Each step sees what was committed before it. What nobody else sees or waits for is done
 * in one step with what comes before it.
 */

/* INSERT … ON CONFLICT DO NOTHING waits for whoever is inserting or deleting the row, and for no lock on it. */
inline put() {
	atomic {
		!other(blob_by, me);
		if
		:: sees(me) -> printf("writer %d: puts, and finds the blob there\n", w + 1)
		:: else -> printf("writer %d: puts the blob\n", w + 1); blob_by = me; blob_new = true
		fi
	}
}

/* The two statements with which the function pin begins. */
inline lock_and_pin() {
	atomic {
		key_exclusive == 0 && !other(pin_locked_by[w], me);
		printf("writer %d: locks the key, and writes a pin\n", w + 1);
		key_shared = key_shared | bit(w); pin_locked_by[w] = me; pin_new[w] = LIVE
	}
}

/* SELECT … FOR KEY SHARE waits for whoever has the row FOR UPDATE. */
inline look(locking) {
	!(locking) || !other(blob_update, me);
	there = sees(me);
	if
	:: there -> printf("writer %d: sees the blob\n", w + 1); if :: locking -> blob_share = blob_share | bit(w) :: else fi
	:: else -> printf("writer %d: sees no blob\n", w + 1)
	fi
}

inline roll_back() {
	printf("writer %d: rolls back\n", w + 1);
	free_writer(w); yes = false
}

/*
 * The deferred trigger on pins, and the commit. A writer that takes a pin away because it refers to the blob now
 * does so while the pin is live: this much is asked of applications.
 */
inline commit() {
	if
	:: COMMIT_CHECK && pin_new[w] == EXPIRED || pin_new[w] == NONE && pin[w] != LIVE -> roll_back()
	:: else ->
		printf("writer %d: commits, and is told yes\n", w + 1); yes = true;
		hollow = (pin_new[w] == EXPIRED);
		if :: blob_by == me -> blob = blob_new :: else fi;
		if :: pin_new[w] != SAME -> pin[w] = pin_new[w] :: else fi;
		if :: ref_new[w] != SAME -> ref[w] = ref_new[w] :: else fi;
		free_writer(w);
		lost = !blob && (referred || pinned);
		assert(!lost); assert(!hollow)
	fi
}

/* Puts, and refers by a column with a foreign key. Knows nothing of pins. */
inline put_and_refer() {
	put();
	atomic {
		look(FOREIGN_KEY_LOCK);
		if
		:: there -> printf("writer %d: refers to the blob\n", w + 1); ref_new[w] = KEYED
		:: else -> roll_back(); goto over
		fi
	};
	atomic { commit() }
}

/* Pins, looks, uploads if need be, and may refer by a column without a foreign key. */
inline pin_and_put() {
	lock_and_pin();
	atomic { look(ROWS); if :: there -> goto uploaded :: else fi };
	put();
uploaded:
	atomic {
		if :: ref_new[w] = LOOSE; printf("writer %d: refers to the blob\n", w + 1) :: true fi;
		commit()
	}
}

/* JointPut: what pin answers doesn't matter, as the lock was there first. */
inline joint_put() {
	if :: atomic { PUT_LOCK && key_exclusive == 0 -> printf("writer %d: locks the key\n", w + 1); key_shared = key_shared | bit(w) } :: !PUT_LOCK fi;
	put();
	lock_and_pin();
	atomic { look(ROWS) };
	atomic { commit() }
}

#define live (pin[w] == LIVE)

/* The renewal of a pin that was committed. */
inline renew() {
	if
	:: RENEWAL_LOCK ->
		atomic { !other(pin_locked_by[w], me); printf("writer %d: locks its pin to renew it\n", w + 1); pin_locked_by[w] = me };
		atomic { if :: live -> pin_new[w] = LIVE; printf("writer %d: renews it\n", w + 1) :: else -> roll_back(); goto over fi }
	:: else ->
		atomic { if :: live -> printf("writer %d: finds its pin live, and wants to renew it\n", w + 1) :: else -> goto over fi };
		atomic { !other(pin_locked_by[w], me); printf("writer %d: renews it\n", w + 1); pin_locked_by[w] = me; pin_new[w] = LIVE }
	fi;
	atomic { commit() }
}

/* Refers, by a column without a foreign key, and takes the pin away, in one transaction. */
inline refer_and_unpin() {
	atomic {
		!other(pin_locked_by[w], me);
		printf("writer %d: refers to the blob, and removes its pin\n", w + 1);
		pin_locked_by[w] = me; ref_new[w] = LOOSE; pin_new[w] = NONE
	};
	atomic { commit() }
}

mtype = { REFERS, PINS, JOINS };

proctype writer(byte w; mtype kind) {
	byte me = w + WRITER_1;
	bool there, yes;
	{
		if
		:: kind == REFERS -> put_and_refer()
		:: kind == PINS -> pin_and_put()
		:: kind == JOINS -> joint_put()
		fi;
		/* A second transaction, of one of them: their pins and references have nothing to do with each other. */
		if
		:: w == 0 && live && !ref[w] -> renew()
		:: w == 0 && live && !ref[w] -> refer_and_unpin()
		:: w == 0 && ref[w] -> atomic { printf("writer %d: drops its reference\n", w + 1); ref[w] = 0 }
		:: true
		fi;
over:		atomic { there = false; yes = false; kind = 0; finished++ }
	} unless { atomic { ended[me] -> printf("writer %d: is dead\n", w + 1); there = false; yes = false; kind = 0; ended[me] = false; finished++ } }
}

/*
 * A sweep. Steps in which nobody else has a part are done in one with what comes before them. A verdict of SURE
 * means that nothing has spoken against the delete so far.
 */
#define SURE 0
#define BACK 1 /* locked or pinned: goes back into the window */
#define USED 2 /* referred to */
#define GONE 3 /* not there */

/* Where the lease is taken a sweep ends at once. This is the one that comes after it. */
inline take_lease() {
	lease == 0; printf("sweeper %d: has the lease\n", me); lease = me
}

/* A key that is referred to leaves the window, unless it is due. */
inline mark() {
	candidate = blob && !referred && !pinned && !window;
	if
	:: window && window_by == 0 && referred -> window = false; owed = false
	:: true
	fi
}

inline verify_lease() {
	if :: lease == me :: else -> printf("sweeper %d: has lost the lease\n", me); goto over fi
}

inline take() {
	window_by == 0;
	verify_lease();
	if
	:: window && ONE_TRANSACTION -> window_by = me
	:: window && !ONE_TRANSACTION -> window = false
	:: true -> goto undue
	fi;
	printf("sweeper %d: takes the key\n", me)
}

#define row_locked (blob_by || blob_update || blob_share)

/* SELECT … FOR UPDATE SKIP LOCKED */
inline lock_blob() {
	if
	:: !blob -> verdict = GONE; printf("sweeper %d: finds no blob\n", me)
	:: blob && !(ROWS && BLOB_LOCK) -> printf("sweeper %d: sees the blob\n", me)
	:: blob && ROWS && BLOB_LOCK && row_locked -> verdict = BACK; printf("sweeper %d: finds the blob's row locked\n", me)
	:: blob && ROWS && BLOB_LOCK && !row_locked -> blob_update = me; printf("sweeper %d: locks the blob's row\n", me)
	fi
}

inline try_key() {
	if
	:: !KEY_LOCK
	:: KEY_LOCK && !key_exclusive && !key_shared -> key_exclusive = me; printf("sweeper %d: locks the key\n", me)
	:: KEY_LOCK && (key_exclusive || key_shared) ->
		printf("sweeper %d: finds the key locked\n", me);
		if :: verdict == SURE -> verdict = BACK :: else fi
	fi
}

inline lock_pins() {
	if :: PIN_LOCK && pin[0] != NONE && pin_locked_by[0] == 0 -> pin_locked_by[0] = me :: else fi;
	if :: PIN_LOCK && pin[1] != NONE && pin_locked_by[1] == 0 -> pin_locked_by[1] = me :: else fi;
	printf("sweeper %d: has locked the pins that aren't locked\n", me)
}

#define contended(w) (PIN_LOCK && pin[w] != NONE && pin_locked_by[w] != me)

/* A pin that has appeared since they were locked counts as contended. */
inline read_pins() {
	if
	:: pinned || contended(0) || contended(1) ->
		printf("sweeper %d: finds a pin that is live, or locked\n", me);
		if :: verdict == SURE -> verdict = BACK :: else fi
	:: else -> printf("sweeper %d: finds no live pin\n", me)
	fi
}

inline read_sources() {
	if
	:: referred -> printf("sweeper %d: finds a reference\n", me); if :: verdict != GONE -> verdict = USED :: else fi
	:: else -> printf("sweeper %d: finds no reference\n", me)
	fi
}

/*
 * The foreign key may be one that cascades: references that are committed don't stop the delete. It waits for
 * whoever has the row locked, which is nobody where the row was locked before.
 */
inline delete() {
	verdict != SURE || !ROWS || !blob_share && !other(blob_update, me) && !other(blob_by, me);
	verify_lease();
	if
	:: verdict == SURE && blob ->
		printf("sweeper %d: deletes the blob\n", me);
		blob_by = me; blob_new = false;
		if :: ROWS -> blob_update = me :: else fi
	:: else
	fi
}

/* Puts back what has to go back, and commits. */
inline commit_batch() {
	window = (verdict == BACK);
	owed = owed && window;
	unauthorised = (blob_by == me && lease != me);
	if :: blob_by == me -> blob = false :: else fi;
	free(me);
	printf("sweeper %d: commits\n", me);
	verdict = SURE;
	lost = !blob && (referred || pinned);
	assert(!lost); assert(!unauthorised)
}

/* A key that is in the window already stays as it is. */
inline stage() {
	if
	:: candidate && window_by == 0 -> printf("sweeper %d: stages the key\n", me); window = true; owed = true
	:: !candidate
	fi
}

proctype sweeper(byte me) {
	byte sweeps, verdict;
	bool candidate;
	do
	:: sweeps < SWEEPS ->
		sweeps++;
		{
			atomic { take_lease(); mark() };
			atomic { take(); lock_blob() };
			if
			:: atomic { PINS_FIRST -> try_key(); lock_pins() }; atomic { read_pins() }; atomic { read_sources() }
			:: atomic { !PINS_FIRST -> try_key() }; atomic { read_sources() }; atomic { lock_pins(); read_pins() }
			fi;
			atomic { delete() };
			atomic { commit_batch() };
undue:			atomic { stage() };
over:	atomic { free(me); verdict = SURE; candidate = false; if :: lease == me -> lease = 0 :: else fi }
		} unless { atomic { ended[me] -> printf("sweeper %d: is dead\n", me); ended[me] = false; verdict = SURE; candidate = false } }
	:: else -> break
	od;
	atomic { sweeps = 0; finished++ }
}

/* Time passes, and sessions end. */
active proctype world() {
end:
	do
	:: atomic { pin[0] == LIVE -> printf("writer 1's pin expires\n"); pin[0] = EXPIRED }
	:: atomic { pin[1] == LIVE -> printf("writer 2's pin expires\n"); pin[1] = EXPIRED }
	:: atomic { pin_new[0] == LIVE && pin[0] != LIVE -> printf("writer 1's new pin expires\n"); pin_new[0] = EXPIRED }
	:: atomic { pin_new[1] == LIVE && pin[1] != LIVE -> printf("writer 2's new pin expires\n"); pin_new[1] = EXPIRED }
	:: atomic { in_transaction(0) -> end_writer(0) }
	:: atomic { in_transaction(1) -> end_writer(1) }
	:: atomic { lease == SWEEPER_1 -> end_sweeper(SWEEPER_1) }
	:: atomic { lease == SWEEPER_2 -> end_sweeper(SWEEPER_2) }
	:: atomic {
		!ONE_SESSION && lease != 0 ->
		printf("sweeper %d: loses the lease, and its other session lives on\n", lease); lease = 0
	   }
	od
}

/* When all have ended nothing is held, and no key that belongs into the window has got out of it. */
init {
	atomic {
		pin_new[0] = SAME; pin_new[1] = SAME; ref_new[0] = SAME; ref_new[1] = SAME;
		if :: blob = true; if :: window = true; owed = true :: true fi :: true fi;
		run sweeper(SWEEPER_1); run sweeper(SWEEPER_2);
		if :: ROWS -> run writer(0, REFERS) :: run writer(0, PINS) :: run writer(0, JOINS) fi;
		if :: ROWS -> run writer(1, REFERS) :: run writer(1, PINS) :: run writer(1, JOINS) fi
	};
	finished == 4;
	forgotten = owed && !window;
	assert(!forgotten);
	assert(!(lease || key_exclusive || key_shared || blob_update || blob_share || blob_by || window_by || pin_locked_by[0] || pin_locked_by[1]))
}
