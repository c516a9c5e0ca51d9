// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sandbox of a session. On Linux (x86_64 and aarch64) with seccomp, the process of a session
//! on a CPU can use little more than memory, threads, clocks and open descriptors.

use pyo3::prelude::*;

/// Restricts this process permanently, as far as the system supports it. The process can no longer
/// open files or sockets, start programs, or reach other processes. Open descriptors stay usable.
///
/// Call this before other threads start, because Landlock restricts only the calling thread and the
/// threads that it starts later.
///
/// Args:
///     gpu: Whether the process can still open files and Unix sockets, which GPU drivers need.
///
/// Returns:
///     A description of what Landlock prevents, and one of what seccomp prevents. A description is
///     missing if the system lacks the mechanism.
#[pyfunction]
#[pyo3(signature = (gpu=false))]
pub(crate) fn sandbox(py: Python<'_>, gpu: bool) -> PyResult<Vec<&'static str>> {
    system::restrict(gpu).map_err(|error| {
        crate::errors::configuration_error(py, &format!("cannot enter the sandbox: {error}"))
    })
}

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod system {
    pub(super) fn restrict(_: bool) -> Result<Vec<&'static str>, String> {
        Ok(Vec::new())
    }
}

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod system {
    use std::collections::BTreeMap;
    use std::error::Error;
    use std::io;

    use landlock::{
        ABI, Access, AccessFs, AccessNet, RestrictionStatus, Ruleset, RulesetAttr, RulesetStatus,
        Scope,
    };
    use libc::c_long;
    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
        SeccompRule, TargetArch, apply_filter_all_threads,
    };

    type BoxedError = Box<dyn Error>;
    type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

    #[cfg(target_arch = "x86_64")]
    const ARCH: TargetArch = TargetArch::x86_64;
    #[cfg(target_arch = "aarch64")]
    const ARCH: TargetArch = TargetArch::aarch64;

    /// The Landlock version whose restrictions are requested. Older kernels apply fewer of them.
    const LANDLOCK: ABI = ABI::V6;

    /// The number of `cachestat` on all architectures, which `libc` does not have on all of them.
    const SYS_CACHESTAT: c_long = 451;

    /// System calls that a session on a CPU may make with any arguments.
    const ALLOWED: &[c_long] = &[
        // Open descriptors.
        libc::SYS_read,
        libc::SYS_write,
        libc::SYS_readv,
        libc::SYS_pread64,
        libc::SYS_preadv,
        libc::SYS_writev,
        libc::SYS_recvfrom,
        libc::SYS_recvmsg,
        libc::SYS_sendto,
        libc::SYS_sendmsg,
        libc::SYS_shutdown,
        libc::SYS_getsockopt,
        libc::SYS_getsockname,
        libc::SYS_getpeername,
        libc::SYS_ppoll,
        libc::SYS_lseek,
        libc::SYS_fstat,
        libc::SYS_fstatfs,
        libc::SYS_close,
        libc::SYS_close_range,
        libc::SYS_dup,
        libc::SYS_dup3,
        libc::SYS_pipe2,
        libc::SYS_eventfd2,
        // Memory, including memory files.
        libc::SYS_brk,
        libc::SYS_mmap,
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_mprotect,
        libc::SYS_madvise,
        libc::SYS_mlock,
        libc::SYS_munlock,
        libc::SYS_mincore,
        SYS_CACHESTAT,
        libc::SYS_get_mempolicy,
        libc::SYS_memfd_create,
        libc::SYS_ftruncate,
        libc::SYS_pkey_alloc,
        // Threads.
        libc::SYS_futex,
        libc::SYS_set_robust_list,
        libc::SYS_get_robust_list,
        libc::SYS_set_tid_address,
        libc::SYS_rseq,
        libc::SYS_membarrier,
        libc::SYS_sched_yield,
        libc::SYS_sched_getaffinity,
        libc::SYS_sched_getparam,
        libc::SYS_sched_getscheduler,
        libc::SYS_getcpu,
        libc::SYS_exit,
        libc::SYS_exit_group,
        // Signal handling of the process itself.
        libc::SYS_rt_sigaction,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_sigaltstack,
        libc::SYS_restart_syscall,
        // Time and identity.
        libc::SYS_clock_gettime,
        libc::SYS_clock_getres,
        libc::SYS_clock_nanosleep,
        libc::SYS_nanosleep,
        libc::SYS_gettimeofday,
        libc::SYS_getrandom,
        libc::SYS_getpid,
        libc::SYS_gettid,
        libc::SYS_getppid,
        libc::SYS_getuid,
        libc::SYS_geteuid,
        libc::SYS_getgid,
        libc::SYS_getegid,
        libc::SYS_getrusage,
        libc::SYS_times,
        libc::SYS_sysinfo,
        libc::SYS_uname,
    ];

    /// System calls of this architecture that a session on a CPU may make with any arguments.
    #[cfg(target_arch = "x86_64")]
    const ARCH_ALLOWED: &[c_long] = &[
        libc::SYS_poll,
        libc::SYS_dup2,
        libc::SYS_pipe,
        libc::SYS_eventfd,
        libc::SYS_time,
        libc::SYS_arch_prctl,
        libc::SYS_getpgrp,
    ];
    #[cfg(target_arch = "aarch64")]
    const ARCH_ALLOWED: &[c_long] = &[];

    /// Socket options that a session on a CPU may set: timeouts, keep-alive probes, and whether TCP
    /// sends data and acknowledgements at once.
    const SOCKET_OPTIONS: &[(i32, i32)] = &[
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
        (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY),
        (libc::IPPROTO_TCP, libc::TCP_QUICKACK),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
    ];

    /// System calls that a session on a GPU may not make.
    const REFUSED: &[c_long] = &[
        libc::SYS_connect,
        libc::SYS_bind,
        libc::SYS_listen,
        libc::SYS_execve,
        libc::SYS_execveat,
        libc::SYS_ptrace,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_pidfd_getfd,
        libc::SYS_bpf,
        libc::SYS_io_uring_setup,
        libc::SYS_kill,
        libc::SYS_tkill,
        libc::SYS_rt_sigqueueinfo,
        libc::SYS_rt_tgsigqueueinfo,
        libc::SYS_pidfd_send_signal,
        libc::SYS_add_key,
        libc::SYS_request_key,
        libc::SYS_keyctl,
        libc::SYS_userfaultfd,
        libc::SYS_perf_event_open,
        libc::SYS_unshare,
        libc::SYS_setns,
        libc::SYS_mount,
        libc::SYS_init_module,
        libc::SYS_finit_module,
        libc::SYS_kexec_load,
    ];

    /// Returns the x32 numbers of `socket` and of the refused system calls. Filters see x32 calls
    /// as calls of x86-64.
    #[cfg(target_arch = "x86_64")]
    fn refused_x32() -> impl Iterator<Item = c_long> {
        // __X32_SYSCALL_BIT of asm/unistd.h. These calls have different numbers in x32, from
        // asm/unistd_x32.h: execve, rt_sigqueueinfo, ptrace, kexec_load, rt_tgsigqueueinfo,
        // process_vm_readv, process_vm_writev and execveat.
        const X32: c_long = 0x4000_0000;
        const OTHER_NUMBERS: [c_long; 8] = [520, 524, 521, 528, 536, 539, 540, 545];
        let others = OTHER_NUMBERS.into_iter().chain([libc::SYS_socket]);
        REFUSED.iter().copied().chain(others).map(|call| call | X32)
    }
    #[cfg(target_arch = "aarch64")]
    fn refused_x32() -> impl Iterator<Item = c_long> {
        std::iter::empty()
    }

    pub(super) fn restrict(gpu: bool) -> Result<Vec<&'static str>, String> {
        without_privileges().map_err(|error| format!("cannot drop capabilities: {error}"))?;
        let mut prevented = Vec::new();
        if landlocked(gpu).map_err(|error| error.to_string())? {
            prevented.push(if gpu {
                "TCP and other processes (Landlock)"
            } else {
                "files, TCP and other processes (Landlock)"
            });
        }
        let filter = filter(gpu).map_err(|error| error.to_string())?;
        let threads = without_clone3().map_err(|error| error.to_string())?;
        if (gpu || apply_filter_all_threads(&threads).is_ok())
            && apply_filter_all_threads(&filter).is_ok()
        {
            prevented.push(if gpu {
                "sockets and programs (seccomp)"
            } else {
                "files, sockets and programs (seccomp)"
            });
        }
        Ok(prevented)
    }

    /// Drops all capabilities, which a process of root has, and prevents core dumps.
    fn without_privileges() -> io::Result<()> {
        /// `__user_cap_header_struct` of linux/capability.h.
        #[repr(C)]
        struct Header {
            version: u32,
            pid: i32,
        }
        // _LINUX_CAPABILITY_VERSION_3. The effective, permitted and inheritable sets have two words
        // each.
        let (header, none) = (Header { version: 0x2008_0522, pid: 0 }, [0u32; 6]);
        // SAFETY: the kernel only reads `header` and `none`, which have the layout of that version
        // and outlive the call.
        let done = unsafe {
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr())
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Prevents access to files (not with `gpu`), TCP ports and other processes, as far as the
    /// kernel supports it. Returns whether the kernel enforces any of these restrictions.
    fn landlocked(gpu: bool) -> Result<bool, BoxedError> {
        let ruleset = Ruleset::default().handle_access(AccessNet::from_all(LANDLOCK))?;
        let ruleset =
            if gpu { ruleset } else { ruleset.handle_access(AccessFs::from_all(LANDLOCK))? };
        let RestrictionStatus { ruleset, .. } =
            ruleset.scope(Scope::from_all(LANDLOCK))?.create()?.restrict_self()?;
        Ok(ruleset != RulesetStatus::NotEnforced)
    }

    fn filter(gpu: bool) -> Result<BpfProgram, BoxedError> {
        let refused = SeccompAction::Errno(libc::EACCES as u32);
        if gpu {
            let refused_calls = REFUSED.iter().copied().chain(refused_x32());
            let mut rules: Rules = refused_calls.map(|call| (call, Vec::new())).collect();
            // Drivers use Unix sockets to reach their services.
            let other_than_unix = Condition(0, SeccompCmpOp::Ne, libc::AF_UNIX as u64);
            rules.insert(libc::SYS_socket, vec![other_than_unix.rule()?]);
            return Ok(SeccompFilter::new(rules, SeccompAction::Allow, refused, ARCH)?.try_into()?);
        }
        let mut rules: Rules =
            ALLOWED.iter().chain(ARCH_ALLOWED).map(|&call| (call, Vec::new())).collect();
        let mut only = |call: c_long, at: u8, values: &[i64]| -> Result<(), BoxedError> {
            let allowed =
                |&value: &i64| Condition(at, SeccompCmpOp::Eq, u64::from(value as u32)).rule();
            rules.insert(call, values.iter().map(allowed).collect::<Result<_, _>>()?);
            Ok(())
        };
        let number = |value: i32| i64::from(value);
        let thread = libc::CLONE_VM
            | libc::CLONE_FS
            | libc::CLONE_FILES
            | libc::CLONE_SIGHAND
            | libc::CLONE_THREAD;
        let namespaces = libc::CLONE_NEWUSER
            | libc::CLONE_NEWNS
            | libc::CLONE_NEWPID
            | libc::CLONE_NEWNET
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUTS
            | libc::CLONE_NEWCGROUP;
        only(
            libc::SYS_fcntl,
            1,
            &[
                number(libc::F_GETFL),
                number(libc::F_SETFL),
                number(libc::F_GETFD),
                number(libc::F_SETFD),
                number(libc::F_DUPFD_CLOEXEC),
                number(libc::F_ADD_SEALS),
                number(libc::F_GET_SEALS),
            ],
        )?;
        // TIOCOUTQ, FIONREAD and FIONBIO.
        only(libc::SYS_ioctl, 1, &[0x5411, 0x541B, 0x5421])?;
        only(
            libc::SYS_prctl,
            0,
            &[number(libc::PR_SET_NAME), number(libc::PR_GET_NAME), number(libc::PR_SET_VMA)],
        )?;
        // Allowed only for threads of this process.
        only(libc::SYS_sched_setaffinity, 0, &[0])?;
        only(libc::SYS_tgkill, 0, &[i64::from(std::process::id())])?;
        // Allows reading the limits of this process, but not setting them.
        let no_new_limit = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
        let own = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, 0)?;
        rules.insert(libc::SYS_prlimit64, vec![SeccompRule::new(vec![own, no_new_limit])?]);
        let option = |&(level, name): &(i32, i32)| -> Result<SeccompRule, BoxedError> {
            let is = |at, value: i32| {
                SeccompCondition::new(at, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value as u64)
            };
            Ok(SeccompRule::new(vec![is(1, level)?, is(2, name)?])?)
        };
        let options = SOCKET_OPTIONS.iter().map(option).collect::<Result<_, _>>()?;
        rules.insert(libc::SYS_setsockopt, options);
        let flags =
            Condition(0, SeccompCmpOp::MaskedEq((thread | namespaces) as u64), thread as u64);
        rules.insert(libc::SYS_clone, vec![flags.rule()?]);
        // The filter of `without_clone3` refuses clone3, and a refusal by either filter counts.
        rules.insert(libc::SYS_clone3, Vec::new());
        Ok(SeccompFilter::new(rules, refused, SeccompAction::Allow, ARCH)?.try_into()?)
    }

    /// Makes the C library fall back from clone3 to clone, whose flags a filter can read.
    fn without_clone3() -> Result<BpfProgram, BoxedError> {
        let rules: Rules = [(libc::SYS_clone3, Vec::new())].into();
        let absent = SeccompAction::Errno(libc::ENOSYS as u32);
        Ok(SeccompFilter::new(rules, SeccompAction::Allow, absent, ARCH)?.try_into()?)
    }

    /// A condition on one argument of a system call.
    struct Condition(u8, SeccompCmpOp, u64);

    impl Condition {
        fn rule(self) -> Result<SeccompRule, BoxedError> {
            let Self(at, op, value) = self;
            Ok(SeccompRule::new(vec![SeccompCondition::new(
                at,
                SeccompCmpArgLen::Dword,
                op,
                value,
            )?])?)
        }
    }
}
