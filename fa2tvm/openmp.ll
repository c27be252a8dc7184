; What a module needs of its surroundings at run time: threads and scratch memory.
;
; Linked into every module, so that a loaded one needs no TVM runtime and shares PyTorch's own
; OpenMP pool: a second pool beside it would fight for the cores. The functions of the OpenMP
; runtime arrive as addresses, so nothing is linked against it.
;
; T.parallel calls __TVMBackendParallelLaunch(lambda, cdata, num_task); the lambda is
; lambda(task, env, cdata) and takes its share of the loop from task and env's number of tasks.

%Env = type { ptr, i32 }
; lambda, cdata, env, next task, error code
%Job = type { ptr, ptr, %Env, i32, i32 }

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
declare i32 @__tvm_ffi_@PASS@(ptr, ptr, i32, ptr)

; Each thread takes the next task until none is left, so every task runs exactly once however
; many threads the OpenMP runtime really gives, and a slow task holds nobody up.
define internal void @worker(ptr %job) {
entry:
  %lambda = load ptr, ptr %job
  %cdata.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 1
  %cdata = load ptr, ptr %cdata.at
  %env = getelementptr inbounds %Job, ptr %job, i32 0, i32 2
  %tasks.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 2, i32 1
  %tasks = load i32, ptr %tasks.at
  %next.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 3
  %error.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 4
  br label %take
take:
  %task = atomicrmw add ptr %next.at, i32 1 monotonic
  %left = icmp slt i32 %task, %tasks
  br i1 %left, label %run, label %done
run:
  %code = call i32 %lambda(i32 %task, ptr %env, ptr %cdata)
  %right = icmp eq i32 %code, 0
  br i1 %right, label %take, label %failed
failed:
  store atomic i32 %code, ptr %error.at monotonic, align 4
  br label %take
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
  %next.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 3
  store i32 0, ptr %next.at
  %error.at = getelementptr inbounds %Job, ptr %job, i32 0, i32 4
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
  store i32 1, ptr %tasks.at
  call void @worker(ptr %job)
  br label %finish
parallel:
  ; Many more tasks than threads even out tasks of unequal cost (causal masks, busy cores).
  %many = mul nsw i32 %threads, 32
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
