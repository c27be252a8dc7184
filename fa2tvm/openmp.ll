; What a module needs of its surroundings at run time: threads and scratch memory.
;
; Linked into every module, so that a loaded one needs no TVM runtime and shares PyTorch's own
; OpenMP pool: a second pool beside it would fight for the cores. The functions of the OpenMP
; runtime arrive as addresses, so nothing is linked against it.
;
; T.parallel calls __TVMBackendParallelLaunch(lambda, cdata, num_task); the lambda is
; lambda(task, env, cdata) and takes its share of the loop from task and env's number of tasks.

%Env = type { ptr, i32 }
; lambda, cdata, env, counters, number of shares, next thread, error code
%Job = type { ptr, ptr, %Env, ptr, i32, i32, i32 }
; Tasks taken from one share; a cache line of its own.
%Counter = type [16 x i32]

@__TVMBackendParallelLaunch = linkonce global ptr null, align 8
@__TVMBackendAllocWorkspace = linkonce global ptr null, align 8
@__TVMBackendFreeWorkspace = linkonce global ptr null, align 8
@gomp_parallel = internal global ptr null, align 8
@omp_max_threads = internal global ptr null, align 8
@omp_in_parallel = internal global ptr null, align 8
@other_pool = internal global ptr null, align 8
; Threads that the current call may use; 0 leaves it to the OpenMP runtime.
@thread_limit = internal thread_local global i32 0, align 4

declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare i32 @__tvm_ffi_@PASS@(ptr, ptr, i32, ptr)

; The tasks are cut into equal contiguous shares, one for each thread asked for. A thread works
; through its own share, whose tasks mostly read the same keys, and then helps with the others'.
; So every task runs exactly once however many threads the OpenMP runtime really gives, and a
; slow task or a busy core holds nobody up.
define internal void @worker(ptr %job) {
entry:
  %lambda = load ptr, ptr %job
  %cdata.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 1
  %cdata = load ptr, ptr %cdata.at
  %env = getelementptr inbounds %Job, ptr %job, i32 0, i32 2
  %tasks.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 2, i32 1
  %tasks = load i32, ptr %tasks.at
  %counters.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 3
  %counters = load ptr, ptr %counters.at
  %shares.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 4
  %shares = load i32, ptr %shares.at
  %thread.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 5
  %error.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 6
  %me = atomicrmw add ptr %thread.at, i32 1 monotonic
  %tasks.wide = zext i32 %tasks to i64
  %shares.wide = zext i32 %shares to i64
  br label %next_share
next_share:
  %visited = phi i32 [ 0, %entry ], [ %visited.next, %share_done ]
  %all = icmp eq i32 %visited, %shares
  br i1 %all, label %done, label %enter_share
enter_share:
  %turn = add i32 %me, %visited
  %share = urem i32 %turn, %shares
  %share.wide = zext i32 %share to i64
  %after.wide = add i64 %share.wide, 1
  %first.scaled = mul i64 %share.wide, %tasks.wide
  %first.wide = udiv i64 %first.scaled, %shares.wide
  %first = trunc i64 %first.wide to i32
  %end.scaled = mul i64 %after.wide, %tasks.wide
  %end.wide = udiv i64 %end.scaled, %shares.wide
  %end = trunc i64 %end.wide to i32
  %counter = getelementptr inbounds %Counter, ptr %counters, i64 %share.wide
  br label %take
take:
  %taken = atomicrmw add ptr %counter, i32 1 monotonic
  %task = add i32 %first, %taken
  %left = icmp slt i32 %task, %end
  br i1 %left, label %run, label %share_done
run:
  %code = call i32 %lambda(i32 %task, ptr %env, ptr %cdata)
  %right = icmp eq i32 %code, 0
  br i1 %right, label %take, label %failed
failed:
  store atomic i32 %code, ptr %error.at monotonic, align 4
  br label %take
share_done:
  %visited.next = add i32 %visited, 1
  br label %next_share
done:
  ret void
}

define internal i32 @parallel_launch(ptr %lambda, ptr %cdata, i32 %num_task) {
entry:
  %job = alloca %Job, align 8
  store ptr %lambda, ptr %job
  %cdata.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 1
  store ptr %cdata, ptr %cdata.at
  %barrier.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 2, i32 0
  store ptr null, ptr %barrier.at
  %tasks.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 2, i32 1
  %counters.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 3
  %shares.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 4
  %thread.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 5
  store i32 0, ptr %thread.at
  %error.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 6
  store i32 0, ptr %error.at
  %limit = load i32, ptr @thread_limit
  %alone = icmp eq i32 %limit, 1
  br i1 %alone, label %serial, label %which
which:
  %gomp = load ptr, ptr @gomp_parallel
  %has_openmp = icmp ne ptr %gomp, null
  br i1 %has_openmp, label %ask, label %without
without:
  %other = load ptr, ptr @other_pool
  %has_other = icmp ne ptr %other, null
  br i1 %has_other, label %delegate, label %serial
delegate:
  %other.code = call i32 %other(ptr %lambda, ptr %cdata, i32 %num_task)
  ret i32 %other.code
ask:
  %in = load ptr, ptr @omp_in_parallel
  %nested = call i32 %in()
  %max = load ptr, ptr @omp_max_threads
  %all = call i32 %max()
  %limited = icmp sgt i32 %limit, 0
  %threads = select i1 %limited, i32 %limit, i32 %all
  %is_nested = icmp ne i32 %nested, 0
  %is_one = icmp sle i32 %threads, 1
  %is_serial = or i1 %is_nested, %is_one
  br i1 %is_serial, label %serial, label %parallel
serial:
  %single = alloca %Counter, align 64
  store i32 0, ptr %single
  store ptr %single, ptr %counters.at
  store i32 1, ptr %shares.at
  store i32 1, ptr %tasks.at
  call void @worker(ptr %job)
  br label %finish
parallel:
  %threads.wide = zext i32 %threads to i64
  %counters = alloca %Counter, i64 %threads.wide, align 64
  %bytes = shl i64 %threads.wide, 6
  call void @llvm.memset.p0.i64(ptr align 64 %counters, i8 0, i64 %bytes, i1 false)
  store ptr %counters, ptr %counters.at
  store i32 %threads, ptr %shares.at
  ; More tasks than threads, so that there is something to help with; but hardly more than the
  ; loop has iterations, or else the last shares are empty and nobody works on a share of its own.
  %many = mul nsw i32 %threads, 16
  %asked = icmp sgt i32 %num_task, 0
  %tasks = select i1 %asked, i32 %num_task, i32 %many
  store i32 %tasks, ptr %tasks.at
  call void %gomp(ptr @worker, ptr %job, i32 %threads, i32 0)
  br label %finish
finish:
  %code = load i32, ptr %error.at
  ret i32 %code
}

define internal ptr @alloc_workspace(i32 %device_type, i32 %device_id, i64 %size, i32 %code, i32 %bits) {
  %above = add i64 %size, 63
  %whole = and i64 %above, -64
  %memory = call ptr @aligned_alloc(i64 64, i64 %whole)
  ret ptr %memory
}

define internal i32 @free_workspace(i32 %device_type, i32 %device_id, ptr %memory) {
  call void @free(ptr %memory)
  ret i32 0
}

; fa2tvm_setup(GOMP_parallel, omp_get_max_threads, omp_in_parallel, keep_other_pool): addresses,
; 0 where there is none. Arguments are 16 bytes each with the value in the second half.
define i32 @__tvm_ffi_fa2tvm_setup(ptr %self, ptr %args, i32 %num_args, ptr %result) {
  %gomp.at = getelementptr i8, ptr %args, i64 8
  %gomp = load ptr, ptr %gomp.at
  store ptr %gomp, ptr @gomp_parallel
  %max.at = getelementptr i8, ptr %args, i64 24
  %max = load ptr, ptr %max.at
  store ptr %max, ptr @omp_max_threads
  %in.at = getelementptr i8, ptr %args, i64 40
  %in = load ptr, ptr %in.at
  store ptr %in, ptr @omp_in_parallel
  %keep.at = getelementptr i8, ptr %args, i64 56
  %keep = load i64, ptr %keep.at
  %keeps = icmp ne i64 %keep, 0
  %pool = load ptr, ptr @__TVMBackendParallelLaunch
  %other = select i1 %keeps, ptr %pool, ptr null
  store ptr %other, ptr @other_pool
  store ptr @parallel_launch, ptr @__TVMBackendParallelLaunch
  store ptr @alloc_workspace, ptr @__TVMBackendAllocWorkspace
  store ptr @free_workspace, ptr @__TVMBackendFreeWorkspace
  ret i32 0
}

; fa2tvm_limit(threads): for code that cannot be linked with this file (jit.py), whose pass has no
; such argument; fa2tvm_address(which) gives it the functions above.
define i32 @__tvm_ffi_fa2tvm_limit(ptr %self, ptr %args, i32 %num_args, ptr %result) {
  %value.at = getelementptr i8, ptr %args, i64 8
  %limit = load i32, ptr %value.at
  store i32 %limit, ptr @thread_limit
  ret i32 0
}

define i32 @__tvm_ffi_fa2tvm_address(ptr %self, ptr %args, i32 %num_args, ptr %result) {
  %which.at = getelementptr i8, ptr %args, i64 8
  %which = load i32, ptr %which.at
  %is_launch = icmp eq i32 %which, 0
  %is_alloc = icmp eq i32 %which, 1
  %memory = select i1 %is_alloc, ptr @alloc_workspace, ptr @free_workspace
  %function = select i1 %is_launch, ptr @parallel_launch, ptr %memory
  ; 1 is the type index of an integer.
  store i64 1, ptr %result
  %result.value = getelementptr i8, ptr %result, i64 8
  store ptr %function, ptr %result.value
  ret i32 0
}

; The pass with one more argument, the number of threads that it may use.
define i32 @__tvm_ffi_@PASS@_threads(ptr %self, ptr %args, i32 %num_args, ptr %result) {
  %last = sub nsw i32 %num_args, 1
  %last.wide = sext i32 %last to i64
  %last.bytes = shl nsw i64 %last.wide, 4
  %at = getelementptr i8, ptr %args, i64 %last.bytes
  %value.at = getelementptr i8, ptr %at, i64 8
  %limit = load i32, ptr %value.at
  store i32 %limit, ptr @thread_limit
  %code = call i32 @__tvm_ffi_@PASS@(ptr %self, ptr %args, i32 %last, ptr %result)
  store i32 0, ptr @thread_limit
  ret i32 %code
}
