package fleet

// omit leaves protections out. Only tests set any of it, to show that each
// protection is what stands between its race and a lost blob.
type omit struct {
	KeyLock     bool // arbitration takes neither the pool's lock nor a key's; nor do pins in process
	PoolLock    bool // arbitration takes the locks of keys only
	EntryLock   bool // a joint put takes the key lock only with its pin
	PinRows     bool // arbitration reads pins without locking their rows
	RenewalLock bool // a renewal reads the clock before it has locked its rows
	CommitCheck bool // a pin may have expired when it commits, or, in process, when it is answered
	BlobRow     bool // pin looks for the blob without locking its row
	PinsFirst   bool // arbitration asks the sources before it reads the pins
	Isolation   bool // arbitration decides under any isolation level
}
