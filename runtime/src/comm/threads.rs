//! Virtual ranks: threads of one process that share memory.
//!
//! A collective has phases between which all members meet: they post where their memory is, read each other's, and meet
//! again before anyone goes on. An all-reduce is a reduce-scatter by equal parts followed by a gather, so that it may work
//! in place: part `i` of every input is read by member `i` alone, before it writes part `i` of its output.
//!
//! A meeting orders memory: it goes through one mutex. Each waits with a time limit, notices failures of others, and
//! ends the run when nothing moves any more, saying who waits for whom.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use autoshard_ir::Type;
use autoshard_ir::factor::ReduceKind;

use super::{CommError, CommKind, Communicator, Failure, Group, Tag, World, reduce};
use crate::boxes::{self, BoxCopy};
use crate::device::Mem;
use crate::program::{Place, Rank};

/// The entry of the table.
pub const KIND: CommKind = CommKind {
    connect: |world| Ok(connect(world).into_iter().map(|c| Box::new(c) as Box<dyn Communicator>).collect()),
};

/// How often those who wait look at the watchdog.
const TICK: Duration = Duration::from_millis(200);

/// A lock that a panic of another rank does not spoil: what is guarded is consistent between statements.
fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a rank does, for the watchdog and its message.
#[derive(Debug, Clone, Default)]
struct Status {
    place: Option<Place>,
    wait: Wait,
}

#[derive(Debug, Clone, Default)]
enum Wait {
    /// Runs.
    #[default]
    No,
    /// In a meeting of the group of these members.
    Meet { call: &'static str, members: Arc<[Rank]> },
    /// For a message.
    Message { from: Rank, tag: Tag },
    /// Its step is over.
    Left,
}

struct Shared {
    watchdog: Duration,
    groups: Mutex<BTreeMap<Vec<Rank>, Arc<Cell>>>,
    /// By receiver.
    mail: Vec<Mailbox>,
    status: Vec<Mutex<Status>>,
    /// Grows whenever any rank gets on.
    moves: AtomicU64,
    aborted: AtomicBool,
    failure: Mutex<Option<Failure>>,
}

/// The meeting place of a group.
struct Cell {
    members: Arc<[Rank]>,
    state: Mutex<Meeting>,
    changed: Condvar,
}

#[derive(Default)]
struct Meeting {
    generation: u64,
    arrived: usize,
    posts: Vec<Option<Post>>,
    /// Posts of the meeting that ended last: the next cannot end before all have read them.
    published: Arc<[Post]>,
}

/// What a member brings to a meeting.
#[derive(Clone)]
struct Post {
    call: &'static str,
    /// Type and parameters, which must agree.
    ty: Option<Type>,
    parameters: (usize, usize, Option<ReduceKind>),
    input: Option<Mem>,
    output: Option<Mem>,
}

#[derive(Default)]
struct Mailbox {
    messages: Mutex<VecDeque<(Rank, Tag, Vec<u8>)>>,
    arrived: Condvar,
}

impl Shared {
    fn check(&self) -> Result<(), CommError> {
        if !self.aborted.load(Ordering::Acquire) {
            return Ok(());
        }
        match lock(&self.failure).clone() {
            Some(f) => Err(CommError::Aborted(f)),
            None => Ok(()),
        }
    }

    fn moved(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    fn abort(&self, failure: Failure) -> Failure {
        {
            let mut first = lock(&self.failure);
            if let Some(first) = &*first {
                return first.clone();
            }
            *first = Some(failure.clone());
        }
        self.aborted.store(true, Ordering::Release);
        // Whoever checked before the store holds a lock until it waits: taking the lock first, none misses the notice.
        for cell in lock(&self.groups).values() {
            drop(lock(&cell.state));
            cell.changed.notify_all();
        }
        for m in &self.mail {
            drop(lock(&m.messages));
            m.arrived.notify_all();
        }
        failure
    }

    /// Waits until `ready` gives something. Ends when a rank fails or nothing moves any more.
    fn wait<'a, T, R>(
        &self,
        mut guard: MutexGuard<'a, T>,
        changed: &Condvar,
        mut ready: impl FnMut(&mut T) -> Option<R>,
    ) -> Result<R, CommError> {
        let (mut seen, mut since) = (self.moves.load(Ordering::Relaxed), Instant::now());
        loop {
            if let Some(r) = ready(&mut guard) {
                return Ok(r);
            }
            self.check()?;
            (guard, _) = changed.wait_timeout(guard, TICK.min(self.watchdog)).unwrap_or_else(PoisonError::into_inner);
            let now = self.moves.load(Ordering::Relaxed);
            if now != seen {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() >= self.watchdog {
                let busy = self.status.iter().any(|s| matches!(lock(s).wait, Wait::No));
                if !busy {
                    if let Some(r) = ready(&mut guard) {
                        return Ok(r);
                    }
                    drop(guard);
                    return Err(CommError::Stuck(self.who_waits(since.elapsed())));
                }
            }
        }
    }

    /// Who waits for whom.
    fn who_waits(&self, silent: Duration) -> String {
        let status: Vec<Status> = self.status.iter().map(|s| lock(s).clone()).collect();
        let mut text = format!("nothing has moved for {:.1} s:", silent.as_secs_f64());
        for (rank, s) in status.iter().enumerate() {
            let at = s.place.map_or("outside of instructions".into(), |p| p.to_string());
            text += &match &s.wait {
                Wait::No => format!("\n  rank {rank} computes ({at})"),
                Wait::Left => format!("\n  rank {rank} has ended its step"),
                Wait::Message { from, tag } => {
                    format!("\n  rank {rank} waits for a message of rank {} ({tag:?}) ({at})", from.0)
                }
                Wait::Meet { call, members } => {
                    let here = |r: &Rank| match &status[r.0 as usize].wait {
                        Wait::Meet { members: m, .. } => Arc::ptr_eq(m, members),
                        _ => false,
                    };
                    let missing: Vec<String> = members.iter().filter(|r| !here(r)).map(|r| r.0.to_string()).collect();
                    format!("\n  rank {rank} waits in {call} for ranks {} ({at})", missing.join(", "))
                }
            };
        }
        text
    }
}

/// Connects that many virtual ranks.
pub fn connect(world: World) -> Vec<Threads> {
    let n = world.ranks;
    let shared = Arc::new(Shared {
        watchdog: world.watchdog,
        groups: Mutex::default(),
        mail: (0..n).map(|_| Mailbox::default()).collect(),
        status: (0..n).map(|_| Mutex::default()).collect(),
        moves: AtomicU64::new(0),
        aborted: AtomicBool::new(false),
        failure: Mutex::new(None),
    });
    (0..n as u32).map(|r| Threads { rank: Rank(r), shared: shared.clone(), groups: Vec::new() }).collect()
}

/// The communicator of one virtual rank.
pub struct Threads {
    rank: Rank,
    shared: Arc<Shared>,
    /// Groups that this rank opened, and its position in them.
    groups: Vec<(Arc<Cell>, usize)>,
}

impl Threads {
    fn waiting(&self, wait: Wait) {
        lock(&self.shared.status[self.rank.0 as usize]).wait = wait;
    }

    /// Meets the other members; returns what all of them posted, in the group's order.
    fn meet(&self, group: Group, post: Post) -> Result<Arc<[Post]>, CommError> {
        let (cell, me) = &self.groups[group.0];
        let call = post.call;
        self.shared.check()?;
        self.shared.moved();
        let mut m = lock(&cell.state);
        let generation = m.generation;
        m.posts[*me] = Some(post);
        m.arrived += 1;
        if m.arrived == cell.members.len() {
            m.arrived = 0;
            m.generation += 1;
            m.published = m.posts.iter_mut().filter_map(Option::take).collect();
            cell.changed.notify_all();
            return Ok(m.published.clone());
        }
        self.waiting(Wait::Meet { call, members: cell.members.clone() });
        let done = |m: &mut Meeting| (m.generation != generation).then(|| m.published.clone());
        let posts = self.shared.wait(m, &cell.changed, done)?;
        self.waiting(Wait::No);
        Ok(posts)
    }

    /// The first meeting of a collective: where the memory of all members is. They must have called the same.
    fn begin(&self, group: Group, post: Post) -> Result<(Arc<[Post]>, usize), CommError> {
        let (cell, me) = &self.groups[group.0];
        let posts = self.meet(group, post)?;
        let mine = &posts[*me];
        for (r, p) in cell.members.iter().zip(posts.iter()) {
            if (p.call, &p.ty, p.parameters) != (mine.call, &mine.ty, mine.parameters) {
                let show = |p: &Post| {
                    let ty = p.ty.as_ref().map(Type::to_string).unwrap_or_default();
                    format!("{} {ty} {:?}", p.call, p.parameters)
                };
                return Err(CommError::Mismatch(format!(
                    "rank {} calls {} where rank {} calls {}",
                    r.0,
                    show(p),
                    self.rank.0,
                    show(mine)
                )));
            }
        }
        Ok((posts, *me))
    }

    /// The last meeting: nobody needs the others' memory any more.
    fn end(&self, group: Group) -> Result<(), CommError> {
        let nothing =
            Post { call: "the end of a collective", ty: None, parameters: (0, 0, None), input: None, output: None };
        self.meet(group, nothing).map(|_| ())
    }
}

fn fits(what: &str, mem: Mem, bytes: usize) -> Result<(), CommError> {
    if mem.bytes() != bytes {
        return Err(CommError::Mismatch(format!("{what} has {} bytes, expected {bytes}", mem.bytes())));
    }
    Ok(())
}

/// What members posted: all did, since they called the same.
fn inputs(posts: &[Post]) -> Vec<*const u8> {
    posts.iter().filter_map(|p| p.input.map(|m| m.address().cast_const())).collect()
}

impl Communicator for Threads {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn open_group(&mut self, members: &[Rank]) -> Result<Group, CommError> {
        let me = members.iter().position(|r| *r == self.rank);
        let (Some(me), true) = (me, members.iter().all(|r| (r.0 as usize) < self.shared.status.len())) else {
            return Err(CommError::Mismatch(format!("rank {} is not of the group {members:?}", self.rank.0)));
        };
        let mut groups = lock(&self.shared.groups);
        let cell = groups.entry(members.to_vec()).or_insert_with(|| {
            let meeting = Meeting { posts: vec![None; members.len()], ..Meeting::default() };
            Arc::new(Cell { members: members.into(), state: Mutex::new(meeting), changed: Condvar::new() })
        });
        self.groups.push((cell.clone(), me));
        Ok(Group(self.groups.len() - 1))
    }

    fn enter(&mut self, place: Option<Place>) -> Result<(), CommError> {
        self.shared.moved();
        *lock(&self.shared.status[self.rank.0 as usize]) = Status { place, wait: Wait::No };
        self.shared.check()
    }

    fn all_reduce(
        &mut self,
        group: Group,
        ty: &Type,
        kind: ReduceKind,
        input: Mem,
        output: Mem,
    ) -> Result<(), CommError> {
        fits("the input", input, ty.bytes())?;
        fits("the output", output, ty.bytes())?;
        if !reduce::supports(ty.dtype, kind) {
            return Err(CommError::Mismatch(format!("{ty} is not combined by {}", kind.name())));
        }
        let post = Post {
            call: "all-reduce",
            ty: Some(ty.clone()),
            parameters: (0, 0, Some(kind)),
            input: Some(input),
            output: Some(output),
        };
        let (posts, me) = self.begin(group, post)?;
        let n = posts.len();
        let element = ty.dtype.size();
        let part = |i: usize| (ty.numel() * i / n * element, ty.numel() * (i + 1) / n * element);
        let (start, end) = part(me);
        // SAFETY: all members posted memory of `ty.bytes()` bytes, as each checked. Part `me` of the inputs is read here
        // and, where input and output are one, written by this member alone until the next meeting; outputs that are no
        // inputs are written by their owner alone. Addresses are those of buffers, aligned to 64 bytes.
        unsafe {
            let from: Vec<*const u8> = inputs(&posts).iter().map(|p| p.add(start)).collect();
            reduce::combine(ty.dtype, kind, &from, output.address().add(start), end - start);
        }
        self.end(group)?;
        for (i, p) in posts.iter().enumerate().filter(|(i, _)| *i != me) {
            let Some(theirs) = p.output else { continue };
            let (start, end) = part(i);
            // SAFETY: part `i` of member `i`'s output is complete since the last meeting, and is not written before the
            // next; this member alone writes its own output. The outputs of two members are disjoint.
            unsafe {
                std::ptr::copy_nonoverlapping(theirs.address().add(start), output.address().add(start), end - start);
            }
        }
        self.end(group)
    }

    fn all_gather(&mut self, group: Group, shard: &Type, dim: usize, input: Mem, output: Mem) -> Result<(), CommError> {
        let mut whole = shard.clone();
        whole.dims[dim] *= self.groups[group.0].0.members.len();
        fits("the input", input, shard.bytes())?;
        fits("the output", output, whole.bytes())?;
        let post = Post {
            call: "all-gather",
            ty: Some(shard.clone()),
            parameters: (dim, 0, None),
            input: Some(input),
            output: Some(output),
        };
        let (posts, _) = self.begin(group, post)?;
        let zero = vec![0; shard.rank()];
        for (i, from) in inputs(&posts).into_iter().enumerate() {
            let mut at = zero.clone();
            at[dim] = i * shard.dims[dim];
            let c = BoxCopy {
                dims: &shard.dims,
                from_dims: &shard.dims,
                from_origin: &zero,
                to_dims: &whole.dims,
                to_origin: &at,
                element: shard.dtype.size(),
            };
            // SAFETY: lengths are checked by every member; inputs are not written before the next meeting, and this
            // member alone writes its output, which overlaps no input.
            boxes::runs(&c, |a, b, n| unsafe {
                std::ptr::copy_nonoverlapping(from.add(a), output.address().add(b), n);
            });
        }
        self.end(group)
    }

    fn reduce_scatter(
        &mut self,
        group: Group,
        shard: &Type,
        dim: usize,
        kind: ReduceKind,
        input: Mem,
        output: Mem,
    ) -> Result<(), CommError> {
        let mut whole = shard.clone();
        whole.dims[dim] *= self.groups[group.0].0.members.len();
        fits("the input", input, whole.bytes())?;
        fits("the output", output, shard.bytes())?;
        if !reduce::supports(shard.dtype, kind) {
            return Err(CommError::Mismatch(format!("{shard} is not combined by {}", kind.name())));
        }
        let post = Post {
            call: "reduce-scatter",
            ty: Some(shard.clone()),
            parameters: (dim, 0, Some(kind)),
            input: Some(input),
            output: Some(output),
        };
        let (posts, me) = self.begin(group, post)?;
        let zero = vec![0; shard.rank()];
        let mut at = zero.clone();
        at[dim] = me * shard.dims[dim];
        let c = BoxCopy {
            dims: &shard.dims,
            from_dims: &whole.dims,
            from_origin: &at,
            to_dims: &shard.dims,
            to_origin: &zero,
            element: shard.dtype.size(),
        };
        let all = inputs(&posts);
        let mut from = all.clone();
        // SAFETY: as in `all_gather`; runs are whole elements, so alignment is kept.
        boxes::runs(&c, |a, b, n| unsafe {
            from.iter_mut().zip(&all).for_each(|(f, p)| *f = p.add(a));
            reduce::combine(shard.dtype, kind, &from, output.address().add(b), n);
        });
        self.end(group)
    }

    fn all_to_all(
        &mut self,
        group: Group,
        ty: &Type,
        gather: usize,
        split: usize,
        input: Mem,
        output: Mem,
    ) -> Result<(), CommError> {
        let n = self.groups[group.0].0.members.len();
        if gather == split || !ty.dims[split].is_multiple_of(n) {
            return Err(CommError::Mismatch(format!("{ty} cannot be cut {n} ways along dim {split}")));
        }
        fits("the input", input, ty.bytes())?;
        fits("the output", output, ty.bytes())?;
        let post = Post {
            call: "all-to-all",
            ty: Some(ty.clone()),
            parameters: (gather, split, None),
            input: Some(input),
            output: Some(output),
        };
        let (posts, me) = self.begin(group, post)?;
        let mut part = ty.dims.clone();
        part[split] /= n;
        let mut result = part.clone();
        result[gather] *= n;
        let mut cut = vec![0; ty.rank()];
        cut[split] = me * part[split];
        for (i, from) in inputs(&posts).into_iter().enumerate() {
            let mut at = vec![0; ty.rank()];
            at[gather] = i * part[gather];
            let c = BoxCopy {
                dims: &part,
                from_dims: &ty.dims,
                from_origin: &cut,
                to_dims: &result,
                to_origin: &at,
                element: ty.dtype.size(),
            };
            // SAFETY: as in `all_gather`.
            boxes::runs(&c, |a, b, n| unsafe {
                std::ptr::copy_nonoverlapping(from.add(a), output.address().add(b), n);
            });
        }
        self.end(group)
    }

    fn send(&mut self, to: Rank, tag: Tag, input: Mem) -> Result<(), CommError> {
        self.shared.check()?;
        self.shared.moved();
        // SAFETY: the memory is this rank's own, and only read while this call lasts.
        let bytes = unsafe { std::slice::from_raw_parts(input.address(), input.bytes()) }.to_vec();
        let mailbox = &self.shared.mail[to.0 as usize];
        lock(&mailbox.messages).push_back((self.rank, tag, bytes));
        mailbox.arrived.notify_all();
        Ok(())
    }

    fn recv(&mut self, from: Rank, tag: Tag, output: Mem) -> Result<(), CommError> {
        let mailbox = &self.shared.mail[self.rank.0 as usize];
        self.shared.moved();
        self.waiting(Wait::Message { from, tag });
        let take = |queue: &mut VecDeque<(Rank, Tag, Vec<u8>)>| {
            let at = queue.iter().position(|(f, t, _)| (*f, *t) == (from, tag))?;
            queue.remove(at)
        };
        let (_, _, bytes) = self.shared.wait(lock(&mailbox.messages), &mailbox.arrived, take)?;
        self.waiting(Wait::No);
        fits("the buffer of a receive", output, bytes.len())?;
        // SAFETY: lengths agree; the memory is this rank's own while this call lasts.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), output.address(), bytes.len()) };
        Ok(())
    }

    fn leave(&mut self) {
        self.shared.moved();
        *lock(&self.shared.status[self.rank.0 as usize]) = Status { place: None, wait: Wait::Left };
    }

    fn abort(&mut self, failure: Failure) -> Failure {
        self.shared.abort(failure)
    }
}
